"""Layer-wise relevance propagation written out operation by operation, on relevances instead of gradients.

A tape of `Node`s for one sentence; each operation says how the relevance of its result is divided among its
inputs, by the formulas of Bach et al. 2015, Ali et al. 2022 and Achtibat et al. 2024. Models built of it:
the native Transformer, Llama and T5 of transformers, straight from their state dicts.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headscope.model.native.transformer import Transformer
from headscope.model.native.transformer_config import StackConfig
from tests.oracles.native import _embed


@dataclass(eq=False, repr=False)
class Node:
    """A value, what it was made from, and how its relevance is divided among that."""

    value: Tensor
    parents: list[Node] = field(default_factory=list)
    divide: Callable[[Tensor], list[Tensor]] = lambda relevance: []
    relevance: Tensor = field(default_factory=lambda: torch.zeros(()))


@dataclass
class Heads:
    """The nodes of one head that relevances are read at."""

    context: Node
    query: Node
    key: Node
    value: Node


@dataclass
class Tape:
    """`attention` is "cp" or "attnlrp"; `epsilon` as in the rule of that name, relative to the rms of z."""

    attention: str
    epsilon: float | None = None
    heads: dict[tuple[str, int, int], Heads] = field(default_factory=dict)
    own_values: bool = True  # no two heads share a key or value

    def maps(self, inputs: list[Node], weights: list[Tensor], bias: Tensor | None) -> Node:
        """z_j = Σ_inputs Σ_i W_ji x_i + b_j: R_i = Σ_j W_ji x_i R_j / z_j."""
        z = torch.zeros(len(inputs[0].value), len(weights[0]), dtype=torch.float64) if bias is None else bias
        for x, weight in zip(inputs, weights, strict=True):
            z = z + torch.einsum("ni,ji->nj", x.value, weight)

        def divide(relevance: Tensor) -> list[Tensor]:
            ratio = relevance / self.denominator(z)
            return [
                torch.einsum("ni,ji,nj->ni", x.value, weight, ratio) for x, weight in zip(inputs, weights, strict=True)
            ]

        return Node(z, inputs, divide)

    def cuts(self, x: Node, parts: int) -> list[Node]:
        """Equal parts of x's columns, whose relevance goes back to where they were cut."""

        def back(number: int) -> Callable[[Tensor], list[Tensor]]:
            def divide(relevance: Tensor) -> list[Tensor]:
                columns = torch.zeros_like(x.value).unflatten(1, (parts, -1))
                columns[:, number] = relevance
                return [columns.flatten(1)]

            return divide

        return [Node(part, [x], back(n)) for n, part in enumerate(x.value.unflatten(1, (parts, -1)).unbind(1))]

    def denominator(self, z: Tensor) -> Tensor:
        if self.epsilon is None:
            return z
        room = self.epsilon * z.square().mean(dim=-1, keepdim=True).sqrt()
        return z + room * torch.where(z < 0, -1.0, 1.0)

    def adds(self, a: Node, b: Node) -> Node:
        """z = a + b: R_a = a R / z."""
        z = a.value + b.value
        return Node(z, [a, b], lambda relevance: [a.value * relevance / z, b.value * relevance / z])

    def activates(self, x: Node, function: Callable[[Tensor], Tensor]) -> Node:
        """y = f(x): all of it."""
        return Node(function(x.value), [x], lambda relevance: [relevance])

    def multiplies(self, a: Node, b: Node) -> Node:
        """y = a ∘ b: half to each."""
        return Node(a.value * b.value, [a, b], lambda relevance: [relevance / 2, relevance / 2])

    def turns(self, x: Node, matrices: Tensor) -> Node:
        """y_n = M_n x_n for a constant matrix at every position: linear without bias."""
        y = torch.einsum("nji,ni->nj", matrices, x.value)
        return Node(y, [x], lambda relevance: [torch.einsum("ni,nji,nj->ni", x.value, matrices, relevance / y)])

    def normalizes(self, x: Node, weight: Tensor, bias: Tensor | None, eps: float, *, centred: bool) -> Node:
        """A linear map by a matrix for each position: diag(weight / deviation) (I − 1/d), its deviation constant."""
        d = x.value.shape[-1]
        centre = torch.eye(d, dtype=torch.float64) - (1 / d if centred else 0.0)
        difference = x.value @ centre
        deviation = (difference.square().mean(dim=-1) + eps).sqrt()
        matrices = weight[None, :, None] * centre / deviation[:, None, None]
        y = torch.einsum("nji,ni->nj", matrices, x.value) + (0.0 if bias is None else bias)
        return Node(y, [x], lambda relevance: [torch.einsum("ni,nji,nj->ni", x.value, matrices, relevance / y)])

    def attends(
        self, query: Node, key: Node, value: Node, *, causal: bool, scaling: float, bias: Tensor | None = None
    ) -> Node:
        """One head. Relevance of weights, scores, queries and keys is followed cell by cell."""
        q, k, v = query.value, key.value, value.value
        products, weights, scores = (torch.zeros(len(q), len(k), dtype=torch.float64) for _ in range(3))
        for t in range(len(q)):
            limit = t + 1 if causal else len(k)
            products[t, :limit] = q[t] @ k[:limit].T * scaling
            scores[t, :limit] = products[t, :limit] + (0.0 if bias is None else bias[t, :limit])
            weights[t, :limit] = scores[t, :limit].exp() / scores[t, :limit].exp().sum()
        context = weights @ v

        def divide(relevance: Tensor) -> list[Tensor]:
            ratio = relevance / self.denominator(context)
            if self.attention == "cp":
                to_value = torch.einsum("ts,sk,tk->sk", weights, v, ratio)
                return [torch.zeros_like(q), torch.zeros_like(k), to_value]
            to_weights = torch.einsum("ts,sk,tk->ts", weights, v, ratio) / 2
            to_value = torch.einsum("ts,sk,tk->sk", weights, v, ratio) / 2
            # Deep Taylor through the softmax, at the scores; the bias takes its part of them
            to_scores = scores * (to_weights - weights * to_weights.sum(dim=-1, keepdim=True))
            visible = weights > 0
            to_products = torch.where(visible, products * to_scores / torch.where(scores == 0, 1.0, scores), 0.0)
            share = torch.where(visible, to_products / torch.where(products == 0, 1.0, products), 0.0) * scaling / 2
            to_query = torch.einsum("tk,sk,ts->tk", q, k, share)
            to_key = torch.einsum("tk,sk,ts->sk", q, k, share)
            return [to_query, to_key, to_value]

        return Node(context, [query, key, value], divide)


def propagate(start: Node, relevance: Tensor) -> None:
    """Hand relevance back from `start` to every node below it."""
    order: list[Node] = []
    visits: set[int] = set()

    def visit(node: Node) -> None:
        if id(node) not in visits:
            visits.add(id(node))
            for parent in node.parents:
                visit(parent)
            order.append(node)

    visit(start)
    for node in order:
        node.relevance = torch.zeros_like(node.value)
    start.relevance = relevance
    for node in reversed(order):
        for parent, share in zip(node.parents, node.divide(node.relevance), strict=True):
            parent.relevance = parent.relevance + share


def native(model: Transformer, tape: Tape, source: list[int] | None, target: list[int]) -> Node:
    """Logits [t V] of a native model; heads are noted as (side or "cross", layer, head)."""
    state = {key: value.detach().double() for key, value in model.state_dict().items()}
    memory = None
    if source is not None and model.config.encoder is not None:
        memory = _stack(tape, state, "encoder", model.config.encoder, source, None, zero=False)
    x = _stack(tape, state, "decoder", model.config.decoder, target, memory, zero=model.config.start == "zero")
    return tape.maps([x], [state["output.weight"]], state.get("output.bias"))


def _stack(
    tape: Tape, state: dict[str, Tensor], side: str, cfg: StackConfig, ids: list[int], memory: Node | None, zero: bool
) -> Node:
    x = Node(torch.stack([_embed(state, side, cfg, number, n, zero) for n, number in enumerate(ids)]))
    for layer in range(cfg.layers):
        for part in ("self_attention", "cross_attention", "ffn"):
            name = f"{side}.layers.{layer}.{part}"
            if f"{name}_norm.weight" not in state:
                continue
            y = _norm(tape, state, f"{name}_norm", cfg, x) if cfg.norm == "pre" else x
            if part == "ffn":
                inner = tape.maps([y], [state[f"{name}.inner.weight"]], state[f"{name}.inner.bias"])
                function = torch.relu if cfg.activation == "relu" else torch.nn.functional.gelu
                inner = tape.activates(inner, function)
                y = tape.maps([inner], [state[f"{name}.outer.weight"]], state[f"{name}.outer.bias"])
            else:
                keys = memory if part == "cross_attention" and memory is not None else y
                attention_key = ("cross" if part == "cross_attention" else side, layer)
                y = _attention(tape, state, name, cfg, attention_key, y, keys)
            x = tape.adds(x, y) if cfg.norm == "pre" else _norm(tape, state, f"{name}_norm", cfg, tape.adds(x, y))
    return _norm(tape, state, f"{side}.norm", cfg, x) if f"{side}.norm.weight" in state else x


def _norm(tape: Tape, state: dict[str, Tensor], name: str, cfg: StackConfig, x: Node) -> Node:
    return tape.normalizes(x, state[f"{name}.weight"], state[f"{name}.bias"], cfg.norm_epsilon, centred=True)


def _attention(
    tape: Tape, state: dict[str, Tensor], name: str, cfg: StackConfig, attention_key: tuple[str, int], x: Node, y: Node
) -> Node:
    output = state[f"{name}.output.weight"]
    bias = state.get(f"{name}.output.bias", torch.zeros(cfg.d_model, dtype=torch.float64))
    wide = cfg.d_value or cfg.d_head
    contexts, columns = [], []
    count = output.shape[1] // wide
    projections = [
        tape.cuts(tape.maps([states], [state[f"{name}.{kind}.weight"]], state.get(f"{name}.{kind}.bias")), count)
        for kind, states in (("query", x), ("key", y), ("value", y))
        if count
    ]
    for head in range(count):
        parts = [part[head] for part in projections]
        causal = attention_key[0] == "decoder"
        context = tape.attends(*parts, causal=causal, scaling=cfg.d_head**-0.5)
        tape.heads[(*attention_key, head)] = Heads(context, *parts)
        contexts.append(context)
        columns.append(output[:, head * wide : (head + 1) * wide])
    return tape.maps(contexts, columns, bias) if contexts else Node(bias.expand(len(x.value), -1))


def llama(model: Any, tape: Tape, ids: list[int]) -> Node:
    """Logits [t V] of a Llama: rotary positions, grouped keys and values, gated feed-forward, norms without mean."""
    state = {key: value.detach().double() for key, value in model.state_dict().items()}
    config = model.config
    turn = _rotary(len(ids), config.head_dim, config.rope_parameters["rope_theta"])
    x = Node(state["model.embed_tokens.weight"][ids])
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."

        def norm(x: Node, name: str) -> Node:
            return tape.normalizes(x, state[f"{name}.weight"], None, config.rms_norm_eps, centred=False)

        y = norm(x, f"{prefix}input_layernorm")
        contexts, columns = [], []
        counts = {"q": config.num_attention_heads, "k": config.num_key_value_heads, "v": config.num_key_value_heads}
        projections = {
            kind: tape.cuts(tape.maps([y], [state[f"{prefix}self_attn.{kind}_proj.weight"]], None), count)
            for kind, count in counts.items()
        }
        for head in range(config.num_attention_heads):
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            parts = [projections["q"][head], projections["k"][group], projections["v"][group]]
            query, key = tape.turns(parts[0], turn), tape.turns(parts[1], turn)
            context = tape.attends(query, key, parts[2], causal=True, scaling=config.head_dim**-0.5)
            tape.heads["decoder", layer, head] = Heads(context, query, key, parts[2])
            contexts.append(context)
            columns.append(state[f"{prefix}self_attn.o_proj.weight"].unflatten(1, (-1, config.head_dim))[:, head])
        x = tape.adds(x, tape.maps(contexts, columns, None))
        y = norm(x, f"{prefix}post_attention_layernorm")
        gate, up = (tape.maps([y], [state[f"{prefix}mlp.{kind}_proj.weight"]], None) for kind in ("gate", "up"))
        y = tape.multiplies(tape.activates(gate, torch.nn.functional.silu), up)
        x = tape.adds(x, tape.maps([y], [state[f"{prefix}mlp.down_proj.weight"]], None))
    x = norm(x, "model.norm")
    return tape.maps([x], [state["lm_head.weight"]], None)


def _rotary(length: int, width: int, theta: float) -> Tensor:
    """Rotations [n k k] of the first half of a head's neurons against the second, by position."""
    rotations = torch.zeros(length, width, width, dtype=torch.float64)
    middle = width // 2
    for n in range(length):
        for i in range(middle):
            angle = n / theta ** (2 * i / width)
            rotations[n, i, i] = rotations[n, i + middle, i + middle] = math.cos(angle)
            rotations[n, i, i + middle], rotations[n, i + middle, i] = -math.sin(angle), math.sin(angle)
    return rotations


def t5(model: Any, tape: Tape, source: list[int], target: list[int]) -> Node:
    """Logits [t V] of a T5 with gated-gelu: unscaled scores with a bias for each distance, no bias anywhere else."""
    state = {key: value.detach().double() for key, value in model.state_dict().items()}
    memory = _t5_stack(tape, model, state, "encoder", source, None)
    x = _t5_stack(tape, model, state, "decoder", target, memory)
    return tape.maps([x], [state["lm_head.weight"]], None)


def _t5_stack(tape: Tape, model: Any, state: dict[str, Tensor], side: str, ids: list[int], memory: Node | None) -> Node:
    config = model.config
    layers = config.num_layers if side == "encoder" else config.num_decoder_layers
    stack = getattr(model, side)
    attention = stack.block[0].layer[0].SelfAttention
    bias = attention.compute_bias(len(ids), len(ids)).detach().double()[0]  # [h t s]: a table of numbers
    x = Node(state["shared.weight"][ids])

    def norm(x: Node, name: str) -> Node:
        return tape.normalizes(x, state[f"{name}.weight"], None, config.layer_norm_epsilon, centred=False)

    for layer in range(layers):
        kinds = [("SelfAttention", None)] + ([("EncDecAttention", memory)] if memory is not None else [])
        for number, (kind, keys) in enumerate(kinds):
            prefix = f"{side}.block.{layer}.layer.{number}."
            y = norm(x, f"{prefix}layer_norm")
            contexts, columns = [], []
            projections = [
                tape.cuts(tape.maps([states], [state[f"{prefix}{kind}.{name}.weight"]], None), config.num_heads)
                for name, states in (("q", y), ("k", keys or y), ("v", keys or y))
            ]
            for head in range(config.num_heads):
                parts = [part[head] for part in projections]
                context = tape.attends(
                    *parts,
                    causal=side == "decoder" and keys is None,
                    scaling=1.0,
                    bias=bias[head] if keys is None else None,
                )
                tape.heads[side if keys is None else "cross", layer, head] = Heads(context, *parts)
                contexts.append(context)
                columns.append(state[f"{prefix}{kind}.o.weight"].unflatten(1, (-1, config.d_kv))[:, head])
            x = tape.adds(x, tape.maps(contexts, columns, None))
        prefix = f"{side}.block.{layer}.layer.{len(kinds)}."
        y = norm(x, f"{prefix}layer_norm")
        gate, up = (tape.maps([y], [state[f"{prefix}DenseReluDense.wi_{n}.weight"]], None) for n in (0, 1))
        gate = tape.activates(gate, lambda v: torch.nn.functional.gelu(v, approximate="tanh"))
        y = tape.maps([tape.multiplies(gate, up)], [state[f"{prefix}DenseReluDense.wo.weight"]], None)
        x = tape.adds(x, y)
    return norm(x, f"{side}.final_layer_norm")
