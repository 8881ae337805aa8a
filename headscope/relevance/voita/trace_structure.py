"""What belongs together in a trace: projections of one attention, and the sublayer around a cross attention."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from headscope.heads import Site
from headscope.relevance.voita.trace import Step, Trace

_THROUGH = frozenset(["move", "same", "add", "rms", "norm", "product"])


@dataclass(frozen=True, eq=False)
class Group:
    """Linear steps with the same input that feed the same attention: one matrix. In the order of the trace."""

    steps: tuple[Step, ...]
    label: int


@dataclass(frozen=True)
class Cross:
    """The sublayer of a cross attention: ids of its output (`total`) and of the memory; `label` of the path to it."""

    total: int
    memory: int
    label: int


@dataclass
class Structure:
    """Groups by id of each of their steps; cross attentions by the id of their sublayer's input and output."""

    groups: dict[int, Group] = field(default_factory=dict)
    cross_from: dict[int, Cross] = field(default_factory=dict)
    cross_to: set[int] = field(default_factory=set)
    memories: set[int] = field(default_factory=set)


def structure(trace: Trace) -> Structure:
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
            plan.groups |= dict.fromkeys(map(id, members), Group(members, id(step)))
        if step.detail.attention_site.site is Site.CROSS:
            _add_cross(plan, step, trace.steps[order[id(step)] + 1 :], makers)
    return plan


def _projections(tensor: Tensor, makers: dict[int, Step]) -> list[Step]:
    """The linear steps that a query, key or value comes from, past re-arrangements, rotations and norms."""
    waiting, linear, visited = [tensor], [], set()
    while waiting:
        step = makers.get(id(waiting.pop()))
        if step is None or id(step) in visited:
            continue
        visited.add(id(step))
        if step.kind == "linear":
            linear.append(step)
        elif step.kind in _THROUGH:
            waiting += step.inputs
    return linear


def _add_cross(plan: Structure, attention: Step, after: list[Step], makers: dict[int, Step]) -> None:
    memories = {id(step.inputs[0]) for tensor in attention.inputs[1:] for step in _projections(tensor, makers)}
    ends = _sublayer(after, attention)
    if len(memories) != 1 or ends is None:
        return
    entering, leaving = ends
    memory = memories.pop()
    plan.memories.add(memory)
    plan.cross_from[id(entering)] = Cross(id(leaving), memory, id(attention))
    plan.cross_to.add(id(leaving))


def _sublayer(steps: list[Step], attention: Step) -> tuple[Tensor, Tensor] | None:
    """What enters and leaves the residual sublayer of an attention; a norm after the sum (post-norm) is part of it."""
    reached = {id(attention.output)}
    for number, step in enumerate(steps):
        from_attention = [id(tensor) in reached for tensor in step.inputs]
        if step.kind == "add" and sum(from_attention) == 1:
            entering = step.inputs[from_attention.index(False)]
            readers = [reader for reader in steps[number + 1 :] if any(part is step.output for part in reader.inputs)]
            norms = [reader for reader in readers if reader.kind in ("norm", "rms")]
            post = len(norms) == 1 and not any(reader.kind == "add" for reader in readers)
            return entering, norms[0].output if post else step.output
        if any(from_attention):
            reached.add(id(step.output))
    return None
