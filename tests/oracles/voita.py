"""Voita's relevance in matrix form: every transition formed whole, from Jacobians, one sentence and position at a time.

Written from the formulas, for the native Transformer. Two sets of operations (`Program`, `Paper`) share one
walk through the model, which follows the sublayers as the original program does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.functional import jacobian

from headscope.model.mixing.base import Queries

Parts = list[Tensor]


def size(*parts: Tensor) -> Tensor:
    return sum((part.abs().sum() for part in parts), torch.tensor(0.0, dtype=torch.float64))


class Program:
    """Version C: the core rule on every operation."""

    def __init__(self, *, signed: bool, constant: bool, exact_norm: bool = False, eps: float = 1e-5) -> None:
        self.signed, self.constant, self.exact_norm, self.eps = signed, constant, exact_norm, eps

    def rescale(self, reference: Tensor, parts: Parts) -> Parts:
        return [part * size(reference) / (size(*parts) + self.eps) for part in parts]

    def core(
        self, f: Callable[..., Tensor], relevance: Tensor, inputs: Parts, jacobians: list[Tensor] | None = None
    ) -> Parts:
        """z_ji = f(0)_j / N + J_ji x_i for all inputs as one vector, then T and the rescale."""
        matrices = jacobian(f, tuple(inputs)) if jacobians is None else jacobians
        flat = torch.cat([part.reshape(relevance.numel(), -1) for part in matrices], dim=1)
        x = torch.cat([part.reshape(-1) for part in inputs])
        nothing = f(*(torch.zeros_like(part) for part in inputs)).reshape(-1)
        z = nothing[:, None] / len(x) + flat * x
        spread = (relevance.reshape(-1) @ self.transition(z)).split([part.numel() for part in inputs])
        return self.rescale(relevance, [part.view(source.shape) for part, source in zip(spread, inputs, strict=True)])

    def transition(self, z: Tensor) -> Tensor:
        t = torch.zeros_like(z)
        for j in range(len(z)):
            if self.signed:
                total = z[j].sum()
                t[j] = z[j] / (total + (self.eps if total >= 0 else -self.eps))
            else:
                up, down = z[j].clamp(min=0), z[j].clamp(max=0)
                t[j] = 0.5 * up / (up.sum() + self.eps) + 0.5 * down / (down.sum() - self.eps)
        return t

    def rows(self, f: Callable[[Tensor], Tensor], relevance: Tensor, x: Tensor, jacobian_of: Any = None) -> Tensor:
        """One row (token) after the other, then all rows together."""
        outputs = [
            self.core(f, r, [row], None if jacobian_of is None else [jacobian_of(row)])[0]
            for r, row in zip(relevance, x, strict=True)
        ]
        return self.rescale(relevance, [torch.stack(outputs)])[0]

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.rows(lambda row: weight @ row + (0 if bias is None else bias), relevance, x)

    def norm(self, relevance: Tensor, x: Tensor, norm: Any) -> Tensor:
        """One row after the other; the program leaves epsilon out of the first factor of its Jacobian."""

        def published_jacobian(row: Tensor) -> Tensor:
            c, d = row - row.mean(), len(row)
            v = (c**2).mean()
            a = torch.eye(d).to(row) * v**-0.5
            for j in range(d):
                for i in range(d):
                    a[j, i] += c[j] * -0.5 * (v + norm.eps) ** -1.5 * 2 * c[i] / d
            weight: Tensor = norm.weight
            return weight[:, None] * (a - a.mean(dim=1, keepdim=True))

        return self.rows(lambda row: norm(row), relevance, x, None if self.exact_norm else published_jacobian)

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> Parts:
        pairs = [self.core(lambda p, q: p + q, r, [x, y]) for r, x, y in zip(relevance, a, b, strict=True)]
        return [self.rescale(part, [part])[0] for part in map(torch.stack, zip(*pairs, strict=True))]

    def attention(self, relevance: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Callable[..., Tensor]) -> Parts:
        """relevance [h t c], q [h t e], k [h s e], v [h s c]; scores(q, k) of one head."""
        heads = []
        for r, *inputs in zip(relevance, q, k, v, strict=True):

            def f(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
                return torch.softmax(scores(a, b), dim=-1) @ c

            jacobians = list(jacobian(f, tuple(inputs)))
            if self.constant:
                jacobians[:2] = [torch.zeros_like(part) for part in jacobians[:2]]
            heads.append(self.core(f, r, inputs, jacobians))
        return self.rescale(relevance, [torch.stack(part) for part in zip(*heads, strict=True)])

    def mix(self, relevance: Tensor, matrix: Tensor, context: Tensor) -> Tensor:
        """Column by column, then all together."""
        _, t, c = context.shape
        relevances = torch.zeros_like(context)
        for i in range(t):
            for j in range(c):
                relevances[:, i, j] = relevance[:, i, j] @ self.transition(matrix * context[:, i, j])
        return self.rescale(relevance, [relevances])[0]

    def gather(self, *parts: Tensor) -> Tensor:
        total = sum(parts[1:], parts[0])
        return total * size(*parts) / size(total) if size(total) > 0 else total

    def joint(self, incoming: Tensor, states: Tensor, memory: Tensor) -> Parts:
        return [part * size(incoming) / size(states, memory) for part in (states, memory)]


class Paper:
    """Version P: contribution ratios, entry by entry."""

    def over(self, value: Tensor) -> Tensor:
        return value + (1e-9 if value >= 0 else -1e-9)

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        output = torch.zeros_like(x)
        for t, row in enumerate(x):
            for j, w in enumerate(weight):
                output[t] += w * row / self.over((w * row).sum()) * relevance[t, j]
        return output

    def norm(self, relevance: Tensor, x: Tensor, norm: Any) -> Tensor:
        return relevance

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> Parts:
        total = (a + b) + torch.where(a + b < 0, -1e-9, 1e-9)
        return [relevance * a / total, relevance * b / total]

    def attention(self, relevance: Tensor, q: Tensor, k: Tensor, v: Tensor, scores: Callable[..., Tensor]) -> Parts:
        parts = [torch.zeros_like(part) for part in (q, k, v)]
        e = q.shape[-1]
        for h in range(len(q)):
            weights = torch.softmax(scores(q[h], k[h]), dim=-1)
            for t in range(len(q[h])):
                for s in range(len(k[h])):
                    at_weight = torch.tensor(0.0, dtype=q.dtype)
                    for c in range(v.shape[-1]):
                        a, b = weights[t, s], v[h, s, c]
                        r = a * b / self.over((weights[t] * v[h, :, c]).sum()) * relevance[h, t, c]
                        at_weight += r * a / self.over(a + b)
                        parts[2][h, s, c] += r * b / self.over(a + b)
                    query = q[h, t] * e**-0.5
                    total = self.over((query * k[h, s]).sum())
                    for i in range(e):
                        r = query[i] * k[h, s, i] / total * at_weight
                        share = self.over(query[i] + k[h, s, i])
                        parts[0][h, t, i] += r * query[i] / share
                        parts[1][h, s, i] += r * k[h, s, i] / share
        return parts

    def gather(self, *parts: Tensor) -> Tensor:
        return sum(parts[1:], parts[0])

    def joint(self, incoming: Tensor, states: Tensor, memory: Tensor) -> Parts:
        return [states, memory]


class Walk:
    """One sentence through a native Transformer, forwards with everything kept, and back for one position."""

    def __init__(self, model: Any, source: Tensor | None, target: Tensor) -> None:
        self.model = model
        self.stacks: list[tuple[Any, list[dict[str, Any]], Tensor]] = []
        self.memory = None if source is None else self._stack(model.encoder, source, None, causal=False)
        self.states = self._stack(model.decoder, target, self.memory, causal=True)
        self.logits = model.logits(self.states)

    def _stack(self, stack: Any, ids: Tensor, memory: Tensor | None, *, causal: bool) -> Tensor:
        positions = torch.arange(len(ids))
        zero = (positions == 0)[None] if self.model.config.start == "zero" and causal else None
        x = stack.embeddings(ids[None], positions, bound=len(ids), zero=zero)[0]
        steps = []
        for number, layer in enumerate(stack.layers):
            blocks = [("self", layer.self_attention, layer.self_attention_norm)]
            if memory is not None:
                blocks.append(("cross", layer.cross_attention, layer.cross_attention_norm))
            for kind, module, norm in [*blocks, ("ffn", layer.ffn, layer.ffn_norm)]:
                inputs = norm(x) if layer.pre else x
                values = self._inside(kind, module, inputs, memory, causal=causal and kind == "self")
                total = x + values["out"]
                steps.append({"layer": number, "kind": kind, "module": module, "norm": norm, "pre": layer.pre,
                              "x": x, "inputs": inputs, "total": total, **values})  # fmt: skip
                x = total if layer.pre else norm(total)
        out: Tensor = x if stack.norm is None else stack.norm(x)
        self.stacks.append((stack, steps, x))
        return out

    def _inside(self, kind: str, module: Any, x: Tensor, memory: Tensor | None, *, causal: bool) -> dict[str, Any]:
        if kind == "ffn":
            hidden = module.activation(module.inner(x))
            return {"hidden": hidden, "out": module.outer(hidden)}
        keys = memory if kind == "cross" and memory is not None else x
        q, k, v = (
            part(states).view(len(states), module.heads, width).transpose(0, 1)
            for (part, width), states in zip(module.inputs(), (x, keys, keys), strict=True)
        )
        hidden = torch.ones(q.shape[1], k.shape[1]).tril().bool() if causal else None

        def scores(a: Tensor, b: Tensor) -> Tensor:
            logits: Tensor = a @ b.mT * a.shape[-1] ** -0.5
            return logits if hidden is None else logits.masked_fill(~hidden, -1e300)

        context = torch.softmax(scores(q, k), dim=-1) @ v
        queries = Queries(x[None], causal=causal or kind == "cross")
        heads = context if module.mixing is None else module.mixing(context[None], queries)[0]
        return {"q": q, "k": k, "v": v, "scores": scores, "context": context, "mixed": heads,
                "out": module.output(heads.transpose(0, 1).flatten(1))}  # fmt: skip

    def explain(self, ops: Any, position: int, unit: int) -> dict[Any, Tensor]:
        results: dict[Any, Tensor] = {}
        start = torch.zeros_like(self.logits)
        start[position, unit] = 1
        relevance = ops.linear(start, self.states, self.model.output.weight, self.model.output.bias)
        relevance, memories = self._back(ops, self.stacks[-1], relevance, "decoder", results)
        results["target"] = relevance
        if memories:
            results["memory"] = memory = ops.gather(*memories)
            results["source"], _ = self._back(ops, self.stacks[0], memory, "encoder", results)
        return results

    def _back(self, ops: Any, record: Any, relevance: Tensor, side: str, results: Any) -> tuple[Tensor, Parts]:
        stack, steps, last = record
        memories = []
        if stack.norm is not None:
            relevance = ops.norm(relevance, last, stack.norm)
        for step in reversed(steps):
            incoming = relevance
            if not step["pre"]:
                relevance = ops.norm(relevance, step["total"], step["norm"])
            residual, inner = ops.add(relevance, step["x"], step["out"])
            inner, from_memory = self._undo(ops, step, inner, side, results)
            if step["pre"]:
                inner = ops.norm(inner, step["x"], step["norm"])
            relevance = ops.gather(inner, residual)
            if from_memory is not None:
                relevance, from_memory = ops.joint(incoming, relevance, from_memory)
                memories.append(from_memory)
        return relevance, memories

    def _undo(self, ops: Any, step: Any, relevance: Tensor, side: str, results: Any) -> tuple[Tensor, Tensor | None]:
        module = step["module"]
        if step["kind"] == "ffn":
            relevance = ops.linear(relevance, step["hidden"], module.outer.weight, module.outer.bias)
            return ops.linear(relevance, step["inputs"], module.inner.weight, module.inner.bias), None
        columns = step["mixed"].transpose(0, 1).flatten(1)
        relevance = ops.linear(relevance, columns, module.output.weight, module.output.bias)
        relevance = relevance.view(len(relevance), module.heads, -1).transpose(0, 1)  # [h t c]
        site = "cross" if step["kind"] == "cross" else f"{side}-self"
        results[site, step["layer"]] = relevance
        if module.mixing is not None and hasattr(module.mixing, "alpha"):
            relevance = ops.mix(relevance, module.mixing.alpha, step["context"])
        parts = ops.attention(relevance, step["q"], step["k"], step["v"], step["scores"])
        flat = [part.transpose(0, 1).flatten(1) for part in parts]
        projections = [part for part, _ in module.inputs()]
        if step["kind"] == "cross":
            from_query = ops.linear(flat[0], step["inputs"], projections[0].weight, projections[0].bias)
            return from_query, _merge(ops, flat[1:], self.memory, projections[1:])
        return _merge(ops, flat, step["inputs"], projections), None


def _merge(ops: Any, parts: Parts, x: Any, projections: list[Any]) -> Tensor:
    weight = torch.cat([part.weight for part in projections])
    bias = None if projections[0].bias is None else torch.cat([part.bias for part in projections])
    relevance: Tensor = ops.linear(torch.cat(parts, dim=-1), x, weight, bias)
    return relevance
