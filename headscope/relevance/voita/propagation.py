"""Propagate relevance from the output of a recorded forward pass back to its inputs, step by step, by a set of rules.

This file has what does not depend on the rules: the order of the steps, projections of one input for one attention
(which count as one matrix), re-arrangements, sums over paths, and the read-out at heads. Relevance has a leading axis
`p`, the explained positions: one pass serves all of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from headscope.errors import CheckpointError
from headscope.heads import Site, SiteLayer
from headscope.relevance.rulesets import Relevance
from headscope.relevance.voita.rules import OutputUnits, VoitaRules, absolute_total
from headscope.relevance.voita.trace import Step, Trace

_PASSED = frozenset(["move", "same", "add", "norm", "product"])  # kinds of steps between a projection and its attention

Group = tuple[Step, ...]
"""Linear steps with the same input that feed the same attention, which count as one matrix; in the trace's order."""


@dataclass(frozen=True)
class Cross:
    """The sublayer of a cross attention, by ids: of its output (`total`), the memory, and the group that reads it."""

    total: int
    memory: int
    group: int


@dataclass
class Structure:
    """Groups by the id of each of their steps, and cross attentions by the id of their sublayer's input."""

    groups: dict[int, Group] = field(default_factory=dict)
    cross_from: dict[int, Cross] = field(default_factory=dict)


def find_structure(trace: Trace) -> Structure:
    """Find groups and cross attentions in a trace."""
    plan = Structure()
    order = {id(step): number for number, step in enumerate(trace.steps)}
    makers = {id(step.output): step for step in trace.steps}
    for step in trace.steps:
        if step.kind != "attention":
            continue
        by_input: dict[int, dict[int, Step]] = defaultdict(dict)
        for tensor in step.inputs:
            for projection in _projections(tensor, makers):
                by_input[id(projection.inputs[0])][id(projection)] = projection
        for projections in by_input.values():
            members = tuple(sorted(projections.values(), key=lambda member: order[id(member)]))
            plan.groups |= dict.fromkeys(map(id, members), members)
        if step.detail[0].site is Site.CROSS:
            _add_cross(plan, step, trace.steps[order[id(step)] + 1 :], makers)
    return plan


def _projections(tensor: Tensor, makers: dict[int, Step]) -> list[Step]:
    """The linear steps from which a query, key or value results by re-arrangements, rotations and norms."""
    waiting, linear, visited_steps = [tensor], [], set()
    while waiting:
        step = makers.get(id(waiting.pop()))
        if step is None or id(step) in visited_steps:
            continue
        visited_steps.add(id(step))
        if step.kind == "linear":
            linear.append(step)
        elif step.kind in _PASSED:
            waiting += step.inputs
    return linear


def _add_cross(plan: Structure, attention: Step, after: list[Step], makers: dict[int, Step]) -> None:
    projections = [step for tensor in attention.inputs[1:] for step in _projections(tensor, makers)]
    memories, ends = {id(step.inputs[0]) for step in projections}, _sublayer(after, attention)
    if len(memories) == 1 and ends is not None:
        entering, leaving = ends
        plan.cross_from[id(entering)] = Cross(id(leaving), memories.pop(), id(plan.groups[id(projections[0])]))


def _sublayer(steps: list[Step], attention: Step) -> tuple[Tensor, Tensor] | None:
    """The input and output of an attention's residual sublayer; a norm after the sum (post-norm) is part of it."""
    reached_ids = {id(attention.output)}
    for number, step in enumerate(steps):
        from_attention = [id(tensor) in reached_ids for tensor in step.inputs]
        if step.kind == "add" and sum(from_attention) == 1:
            entering = step.inputs[from_attention.index(False)]
            readers = [reader for reader in steps[number + 1 :] if any(part is step.output for part in reader.inputs)]
            norms = [reader for reader in readers if reader.kind == "norm"]
            post = len(norms) == 1 and not any(reader.kind == "add" for reader in readers)
            return entering, norms[0].output if post else step.output
        if any(from_attention):
            reached_ids.add(id(step.output))
    return None


@dataclass
class Propagated:
    """The propagated relevance: of `heads` by (site, layer), `roots` [p b t d] by first block, `memory` [p b s d]."""

    heads: dict[SiteLayer, Relevance] = field(default_factory=dict)
    roots: dict[str, Tensor] = field(default_factory=dict)
    memory: Tensor | None = None


def propagate(trace: Trace, output: Tensor, start: Tensor | OutputUnits, rules: VoitaRules) -> Propagated:
    """Propagate the relevance `start` [p …] of the tensor `output` of a trace back to the inputs of the stacks.

    CheckpointError for an output that was not recorded and for an operation without a rule.
    """
    if not trace.follows(output):
        raise CheckpointError("the output to explain does not come from the attention layers that were recorded")
    propagation = _Propagation(trace, find_structure(trace), rules)
    propagation.pending[id(output)] = [("", start)]
    for step in reversed(trace.steps):
        relevances = propagation.pending.pop(id(step.output), None)
        if relevances is not None:
            propagation.undo(step, propagation.complete(step.output, relevances))
        propagation.finish_projections(step)
    return propagation.result


class _Propagation:
    """The state of one propagation.

    - `pending`: the relevance that reached a tensor so far, labelled by its source, by the tensor's id.
    - `projections`: relevance that waits for the other projections of its group, by the ids of group and step.
    - `totals` [p b]: absolute relevance at the output of every cross attention's sublayer, by its id.
    """

    def __init__(self, trace: Trace, plan: Structure, rules: VoitaRules) -> None:
        self.trace, self.plan, self.rules = trace, plan, rules
        self.result = Propagated()
        self.pending: dict[int, list[tuple[Any, Any]]] = {}
        self.projections: dict[int, dict[int, Tensor]] = {}
        self.totals: dict[int, Tensor] = {}

    def send(self, to: Tensor, relevance: Tensor | None, label: Any = "") -> None:
        """Add relevance to that of a tensor, which is undone when all of it has arrived."""
        if relevance is not None:
            self.pending.setdefault(id(to), []).append((label, relevance))

    def complete(self, tensor: Tensor, relevances: list[tuple[Any, Any]]) -> Any:
        """The summed relevance of a tensor; read out at heads, scaled at the input of a cross attention's sublayer."""
        key = id(tensor)
        relevance = relevances[0][1]
        if len(relevances) > 1:
            relevance = self.rules.gather([_dense(part, tensor) for _, part in relevances])
        cross = self.plan.cross_from.get(key)
        if cross is not None and cross.total in self.totals:
            at_memory = self.pending.get(cross.memory, [])
            for number, (label, part) in enumerate(at_memory):
                if label == cross.group:
                    factor = self.rules.joint(self.totals[cross.total], relevance, part)[..., None, None]  # [p b 1 1]
                    at_memory[number] = (label, part * factor)
                    relevance = relevance * factor
        if any(key == cross.total for cross in self.plan.cross_from.values()):
            self.totals[key] = absolute_total(_dense(relevance, tensor), self.trace.sentences)
        if any(key == cross.memory for cross in self.plan.cross_from.values()):
            self.result.memory = relevance
        if key in self.trace.contexts:
            attention_site, _ = self.trace.contexts[key]
            by_query = relevance.sum(dim=-1)  # [p b h t]
            self.result.heads[attention_site.site_layer] = Relevance(
                raw=by_query.sum(dim=-1), absolute=relevance.abs().sum(dim=(-1, -2)), by_query=by_query
            )
        return relevance

    def undo(self, step: Step, relevance: Any) -> None:
        """Propagate the relevance of a step's output to its inputs."""
        for tensor in step.inputs:
            if id(tensor) in self.trace.overwrites:
                _refuse(self.trace.overwrites[id(tensor)])
        if isinstance(relevance, OutputUnits) and step.kind not in ("linear", "same"):
            relevance = relevance.dense(step.output.shape)
        rules, inputs, parts = self.rules, step.inputs, tuple[Tensor | None, ...]()
        match step.kind:
            case "root":
                self.result.roots[step.name] = relevance
                return
            case "linear" if (group := self.plan.groups.get(id(step))) is not None:
                self.projections.setdefault(id(group), {})[id(step)] = _dense(relevance, step.output)
                return
            case "linear":
                rule = rules.unit if isinstance(relevance, OutputUnits) else rules.linear
                parts = (rule(relevance, inputs[0], *step.detail),)
            case "norm":
                parts = (rules.norm(relevance, inputs[0], step.detail),)
            case "add" | "product":
                parts = tuple((rules.add if step.kind == "add" else rules.product)(relevance, *inputs))
            case "mix":
                parts = (rules.mix(relevance, step.detail, inputs[0]),)
            case "attention":
                parts = self._attention(step, relevance)
            case "same":
                parts = (relevance,)
            case "move":
                parts = undo_move(step, relevance)
            case _:
                _refuse(step.name)
        for tensor, part in zip(inputs, parts, strict=True):
            if self.trace.follows(tensor):
                self.send(tensor, part)

    def _attention(self, step: Step, relevance: Tensor) -> tuple[Tensor | None, ...]:
        attention_site, call = step.detail
        at_inputs, value_share, qk_share = self.rules.attention(relevance, call)
        if (layer := attention_site.site_layer) in self.result.heads:
            at_heads = self.result.heads[layer]
            self.result.heads[layer] = replace(at_heads, value_share=value_share, qk_share=qk_share)
        return at_inputs

    def finish_projections(self, step: Step) -> None:
        """Undo projections that count as one matrix, once the first of them is reached."""
        group = self.plan.groups.get(id(step))
        if group is None or step is not group[0]:
            return
        relevance_of = self.projections.pop(id(group), {})
        members = [member for member in group if id(member) in relevance_of]
        if not members:
            return
        weights, biases = zip(*(member.detail for member in members), strict=True)
        bias = None
        if any(part is not None for part in biases):
            bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
        relevance = torch.cat([relevance_of[id(member)] for member in members], dim=-1)
        self.send(step.inputs[0], self.rules.linear(relevance, step.inputs[0], torch.cat(weights), bias), id(group))


def undo_move(step: Step, relevance: Tensor) -> tuple[Tensor, ...]:
    """The relevance [p …] of a re-arrangement's inputs: its transpose, applied to that of the output."""
    function, args, kwargs, index = step.detail
    with torch.enable_grad():
        leaves = {id(tensor): tensor.detach().to(relevance.dtype).requires_grad_() for tensor in step.inputs}
        kwargs = {name: _replace_leaves(value, leaves) for name, value in kwargs.items()}
        output = function(*_replace_leaves(args, leaves), **kwargs)
        output = output if index is None else output[index]
        return torch.autograd.grad(output, list(leaves.values()), relevance, is_grads_batched=True)


def _replace_leaves(value: Any, leaves: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return leaves.get(id(value), value)
    if type(value) in (tuple, list):
        return type(value)(_replace_leaves(part, leaves) for part in value)
    return value


def _dense(relevance: Tensor | OutputUnits, tensor: Tensor) -> Tensor:
    return relevance.dense(tensor.shape) if isinstance(relevance, OutputUnits) else relevance


def _refuse(name: str) -> NoReturn:
    raise CheckpointError(
        f"no propagation rule is known for {name!r}, which this model applies to its states; "
        "choose a gradient-based rule set (attnlrp, cp, gradient)"
    )
