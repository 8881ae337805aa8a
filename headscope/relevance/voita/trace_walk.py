"""Walk a recorded forward pass backwards, handing relevance from outputs to inputs by a set of rules.

What does not depend on the rules is here: the order of the steps, projections that read the same input for one
attention and count as one matrix, re-arrangements, what reaches a tensor on several ways, and the read-out.
Relevance has a leading axis `p`, the explained positions: one walk serves all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.heads import Site
from headscope.relevance.readout import Relevance
from headscope.relevance.voita.trace import Core, Step, Trace
from headscope.relevance.voita.trace_functions import NormDetail
from headscope.relevance.voita.trace_structure import Structure, structure


@dataclass(frozen=True)
class Units:
    """A start at single output units: `values` [p b] at (position `tokens` [p b], unit `classes` [p b])."""

    tokens: Tensor
    classes: Tensor
    values: Tensor

    def dense(self, shape: torch.Size) -> Tensor:
        """The same as a tensor [p b t n]."""
        found = self.values.new_zeros(len(self.values), *shape)
        p, b = (torch.arange(n, device=found.device) for n in self.values.shape)
        found[p[:, None], b[None], self.tokens, self.classes] = self.values
        return found


class CoreRelevance(NamedTuple):
    """What a rule hands to the inputs of an attention; None where nothing.

    query [p b h t k], key and value [p b g s k]; `value_share` and `qk_share` [p b h] are the sums that go each way.
    """

    query: Tensor | None
    key: Tensor | None
    value: Tensor
    value_share: Tensor
    qk_share: Tensor


class WalkRules(Protocol):
    """How relevance [p …] of a step's output becomes that of its inputs, which have the shapes without `p`."""

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Through x·weightᵀ + bias; weight [o i]."""
        ...

    def unit(self, start: Units, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The same from single units."""
        ...

    def norm(self, relevance: Tensor, x: Tensor, norm: NormDetail) -> Tensor:
        """Through a layer norm or RMS norm."""
        ...

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Through a + b."""
        ...

    def product(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Through a · b, element by element."""
        ...

    def mix(self, relevance: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
        """Through matrix · x, the matrix acting on the last axis but one."""
        ...

    def attention(self, relevance: Tensor, core: Core) -> CoreRelevance:
        """Through a whole softmax attention."""
        ...

    def gather(self, parts: list[Tensor]) -> Tensor:
        """What reached one tensor on several ways, as one."""
        ...

    def joint(self, total: Tensor, own: Tensor, memory: Tensor) -> Tensor:
        """Factor [p b] for what a cross attention's sublayer hands on, `total` [p b] having come in."""
        ...


@dataclass
class WalkResult:
    """Where relevance went: `heads` per (site, layer), `roots` [p b t d] by first block, `memory` [p b s d]."""

    heads: dict[tuple[Site, int], Relevance] = field(default_factory=dict)
    roots: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None


def walk(trace: Trace, output: Tensor, start: Tensor | Units, rules: WalkRules) -> WalkResult:
    """Hand `start` [p …] at the tensor `output` of a trace back to the inputs of the stacks.

    CheckpointError for an output that was not recorded and for an operation that no rule is known for.
    """
    if not trace.follows(output):
        raise CheckpointError("the output to explain does not come from the attention layers that were recorded")
    walker = _Walker(trace, structure(trace), rules)
    walker.pending[id(output)] = [("", start)]
    for step in reversed(trace.steps):
        arrived = walker.pending.pop(id(step.output), None)
        if arrived is not None:
            walker.undo(step, walker.complete(step.output, arrived))
        walker.finish_group(step)
    return walker.found


class _Walker:
    def __init__(self, trace: Trace, plan: Structure, rules: WalkRules) -> None:
        self.trace, self.plan, self.rules = trace, plan, rules
        self.found = WalkResult()
        self.pending: dict[int, list[tuple[Any, Any]]] = {}
        self.waiting: dict[int, dict[int, Tensor]] = {}
        self.totals: dict[int, Tensor] = {}
        self.shares: dict[tuple[Site, int], tuple[Tensor, Tensor]] = {}

    def send(self, to: Tensor, relevance: Tensor | None, label: Any = "") -> None:
        """Leave relevance at a tensor until all that reaches it is there."""
        if relevance is not None:
            self.pending.setdefault(id(to), []).append((label, relevance))

    def complete(self, tensor: Tensor, arrived: list[tuple[Any, Any]]) -> Any:
        """All relevance of a tensor as one; read out where heads are, scaled where a cross attention ends."""
        where = id(tensor)
        relevance = arrived[0][1]
        if len(arrived) > 1:
            relevance = self.rules.gather([_dense(part, tensor) for _, part in arrived])
        cross = self.plan.cross_from.get(where)
        if cross is not None and cross.total in self.totals:
            mine = [i for i, (label, _) in enumerate(self.pending.get(cross.memory, [])) if label == cross.label]
            for i in mine:
                label, there = self.pending[cross.memory][i]
                factor = self.rules.joint(self.totals[cross.total], relevance, there)  # [p b]
                self.pending[cross.memory][i] = (label, there * factor[..., None, None])
                relevance = relevance * factor[..., None, None]
        if where in self.plan.cross_to:
            self.totals[where] = _size(_dense(relevance, tensor), self.trace.sentences)
        if where in self.plan.memories:
            self.found.memory = relevance
        if where in self.trace.contexts:
            self._read(where, relevance)
        return relevance

    def undo(self, step: Step, relevance: Any) -> None:
        """Hand the relevance of a step's output to its inputs."""
        for tensor in step.inputs:
            if id(tensor) in self.trace.spoiled:
                _refuse(self.trace.spoiled[id(tensor)])
        if isinstance(relevance, Units) and step.kind not in ("linear", "same"):
            relevance = relevance.dense(step.output.shape)
        _UNDO.get(step.kind, _unknown)(self, step, relevance)

    def finish_group(self, step: Step) -> None:
        """Undo projections that count as one matrix, once the first of them is reached."""
        group = self.plan.groups.get(id(step))
        if group is None or step is not group.steps[0]:
            return
        arrived = self.waiting.pop(id(group), {})
        members = [each for each in group.steps if id(each) in arrived]
        if not members:
            return
        weights, biases = zip(*(each.detail for each in members), strict=True)
        bias = None
        if any(its is not None for its in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        relevance = torch.cat([arrived[id(each)] for each in members], dim=-1)
        self.send(step.inputs[0], self.rules.linear(relevance, step.inputs[0], torch.cat(weights), bias), group.label)

    def _read(self, where: int, relevance: Tensor) -> None:
        attention_site, _ = self.trace.contexts[where]
        by_query = relevance.sum(dim=-1)  # [p b h t]
        self.found.heads[attention_site.site, attention_site.layer] = Relevance(
            raw=by_query.sum(dim=-1), absolute=relevance.abs().sum(dim=(-1, -2)), by_query=by_query
        )

    def _root(self, step: Step, relevance: Tensor) -> None:
        self.found.roots[step.name] = relevance

    def _linear(self, step: Step, relevance: Any) -> None:
        group = self.plan.groups.get(id(step))
        if group is not None:
            self.waiting.setdefault(id(group), {})[id(step)] = _dense(relevance, step.output)
            return
        rule = self.rules.unit if isinstance(relevance, Units) else self.rules.linear
        self.send(step.inputs[0], rule(relevance, step.inputs[0], *step.detail))

    def _norm(self, step: Step, relevance: Tensor) -> None:
        self.send(step.inputs[0], self.rules.norm(relevance, step.inputs[0], step.detail))

    def _two(self, step: Step, relevance: Tensor) -> None:
        rule = self.rules.add if step.kind == "add" else self.rules.product
        for tensor, part in zip(step.inputs, rule(relevance, *step.inputs), strict=True):
            self.send(tensor, part)

    def _mix(self, step: Step, relevance: Tensor) -> None:
        self.send(step.inputs[0], self.rules.mix(relevance, step.detail, step.inputs[0]))

    def _attention(self, step: Step, relevance: Tensor) -> None:
        found = self.rules.attention(relevance, step.detail)
        attention_site = step.detail.attention_site
        for tensor, part in zip(step.inputs, found[:3], strict=True):
            if self.trace.follows(tensor):
                self.send(tensor, part)
        own = self.found.heads.get((attention_site.site, attention_site.layer))
        if own is not None:
            self.found.heads[attention_site.site, attention_site.layer] = Relevance(
                own.raw, own.absolute, own.by_query, found.value_share, found.qk_share
            )

    def _same(self, step: Step, relevance: Any) -> None:
        self.send(step.inputs[0], relevance)

    def _move(self, step: Step, relevance: Tensor) -> None:
        for tensor, part in zip(step.inputs, unmoved(step, relevance), strict=True):
            self.send(tensor, part)


def unmoved(step: Step, relevance: Tensor) -> tuple[Tensor, ...]:
    """Relevance [p …] of a re-arrangement's output, put back where its inputs were."""
    function, args, kwargs, index = step.detail
    with torch.enable_grad():
        leaves = {id(tensor): tensor.detach().to(relevance.dtype).requires_grad_() for tensor in step.inputs}
        args, kwargs = _replaced(args, leaves), {name: _replaced(value, leaves) for name, value in kwargs.items()}
        output = function(*args, **kwargs)
        output = output if index is None else output[index]
        return torch.autograd.grad(output, list(leaves.values()), relevance, is_grads_batched=True)


def _replaced(value: Any, leaves: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return leaves.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_replaced(part, leaves) for part in value)
    return value


def _dense(relevance: Any, tensor: Tensor) -> Tensor:
    found: Tensor = relevance.dense(tensor.shape) if isinstance(relevance, Units) else relevance
    return found


def _size(relevance: Tensor, sentences: int) -> Tensor:
    return relevance.abs().reshape(len(relevance), sentences, -1).sum(dim=-1)


def _unknown(walker: _Walker, step: Step, relevance: Any) -> None:
    _refuse(step.name)


def _refuse(name: str) -> None:
    raise CheckpointError(
        f"no propagation rule is known for {name!r}, which this model applies to its states; "
        "choose a gradient-based rule set (attnlrp, cp, gradient)"
    )


_UNDO: dict[str, Callable[[_Walker, Step, Any], None]] = {
    "root": _Walker._root,
    "linear": _Walker._linear,
    "norm": _Walker._norm,
    "rms": _Walker._norm,
    "add": _Walker._two,
    "product": _Walker._two,
    "mix": _Walker._mix,
    "attention": _Walker._attention,
    "same": _Walker._same,
    "move": _Walker._move,
}
