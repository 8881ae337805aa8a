"""As many query heads in every group of a layer: what kernels for grouped-query attention hold without padding.

A layer loses one head of each of its groups at a time: of every group the one with the lowest score. Such sets of heads
compete over the whole model by the mean of their scores, so that layers keep as many as their scores say.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.heads import Site
from headscope.pruning.gate_layout import GateLayout


def removal_sets(gating: GateLayout, scores: Tensor, left: Tensor) -> Tensor:
    """The units that go together [n u] of those that are `left` [m], by their scores [units]: here one of every group.

    In each module the lowest of all groups are a set, then the second lowest, as long as all groups have one that may
    go. Where groups go whole a set is a unit [n 1].
    """
    if not gating.groups:
        return left[:, None]
    sets = []
    for module, groups in gating.groups.items():
        by_group = _by_group(gating, module, groups, left.tolist())
        lowest_first = [sorted(units, key=lambda unit: float(scores[unit])) for units in by_group]
        sets += list(zip(*lowest_first, strict=False))
    return torch.tensor(sets, dtype=torch.long).view(len(sets), next(iter(gating.groups.values())))


def per_group_quotas(gating: GateLayout, keep: int) -> list[tuple[Tensor, int]]:
    """All units [n], and how many of them stay; ConfigError with the nearest numbers of heads for others."""
    size, most = _size(gating), _most(gating)
    gone, short = divmod(gating.heads - keep, size)
    if short or not 0 <= gone <= most:
        near = {gating.heads - size * min(max(count, 0), most) for count in (gone, gone + 1)}
        raise ConfigError(
            f"--keep {keep} is not as many heads of each group: one of every group of a layer goes at a time, {size} "
            f"heads; keep {' or '.join(str(number) for number in sorted(near) if number)}"
        )
    heads_of_unit = len(gating.units[0])
    return [(torch.arange(len(gating.units)), len(gating.units) - gone * size // heads_of_unit)]


def per_group_keep(gating: GateLayout, fraction: float) -> int:
    """The number of heads nearest to a fraction of them all where every group of a layer keeps as many."""
    size = _size(gating)
    return gating.heads - size * min(round((1 - fraction) * gating.heads / size), _most(gating))


def _size(gating: GateLayout) -> int:
    """Heads that go at a time; ConfigError where layers differ in it."""
    sizes = {groups * len(unit) for groups in gating.groups.values() for unit in gating.units}
    if len(sizes) != 1:
        raise ConfigError(
            "--allocate per-group takes one head of every group at a time, and layers of these sites have different "
            f"numbers of groups ({', '.join(map(str, sorted(sizes)))}); choose --sites that have one"
        )
    return sizes.pop()


def _most(gating: GateLayout) -> int:
    """How many sets may go."""
    return len(removal_sets(gating, torch.zeros(len(gating.units)), torch.arange(len(gating.units))))


def _by_group(gating: GateLayout, module: tuple[Site, int], groups: int, left: list[int]) -> list[list[int]]:
    """Of the units that are left those of every group of a module."""
    shared = gating.counts[module] // groups
    by_group: list[list[int]] = [[] for _ in range(groups)]
    for number in left:
        if gating.modules[number] == module:
            by_group[gating.units[number][0].head // shared].append(number)
    return by_group
