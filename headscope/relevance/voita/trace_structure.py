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
    """The sublayer of a cross attention: ids of its output (`total`) and of the memory; `label` of the way there."""

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
    found = Structure()
    order = {id(step): number for number, step in enumerate(trace.steps)}
    makers = {id(step.output): step for step in trace.steps}
    for step in trace.steps:
        if step.kind != "attention":
            continue
        by_input: dict[int, dict[int, Step]] = defaultdict(dict)
        for tensor in step.inputs:
            for projection in _projections(tensor, makers):
                by_input[id(projection.inputs[0])][id(projection)] = projection
        for mine in by_input.values():
            members = tuple(sorted(mine.values(), key=lambda each: order[id(each)]))
            group = Group(members, id(step))
            found.groups |= {id(each): group for each in members}
        if step.detail.attention_site.site is Site.CROSS:
            _note_cross(trace, found, step, order[id(step)], makers)
    return found


def _projections(tensor: Tensor, makers: dict[int, Step]) -> list[Step]:
    """The linear steps that a query, key or value comes from, past re-arrangements, rotations and norms."""
    waiting, linear, seen = [tensor], [], set()
    while waiting:
        step = makers.get(id(waiting.pop()))
        if step is None or id(step) in seen:
            continue
        seen.add(id(step))
        if step.kind == "linear":
            linear.append(step)
        elif step.kind in _THROUGH:
            waiting += step.inputs
    return linear


def _note_cross(trace: Trace, found: Structure, core: Step, number: int, makers: dict[int, Step]) -> None:
    memories = {id(each.inputs[0]) for tensor in core.inputs[1:] for each in _projections(tensor, makers)}
    ends = _sublayer(trace.steps[number + 1 :], core)
    if len(memories) != 1 or ends is None:
        return
    entering, leaving = ends
    memory = memories.pop()
    found.memories.add(memory)
    found.cross_from[id(entering)] = Cross(id(leaving), memory, id(core))
    found.cross_to.add(id(leaving))


def _sublayer(steps: list[Step], core: Step) -> tuple[Tensor, Tensor] | None:
    """What enters and leaves the residual sublayer of an attention; a norm after the sum (post-norm) is part of it."""
    reached = {id(core.output)}
    for number, step in enumerate(steps):
        mine = [id(tensor) in reached for tensor in step.inputs]
        if step.kind == "add" and sum(mine) == 1:
            entering = step.inputs[mine.index(False)]
            readers = [each for each in steps[number + 1 :] if any(part is step.output for part in each.inputs)]
            norms = [each for each in readers if each.kind in ("norm", "rms")]
            post = len(norms) == 1 and not any(each.kind == "add" for each in readers)
            return entering, norms[0].output if post else step.output
        if any(mine):
            reached.add(id(step.output))
    return None
