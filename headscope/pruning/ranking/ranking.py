"""Choose heads to remove by their scores: at once or in steps, with an allocation to layers.

`per-layer`: all modules keep the same share (largest remainders). `uniform`: all layers of a stack keep the same
number, which plain classes and most engines require. `per-group`: all key/value groups of a layer keep the same number
of query heads, which kernels for grouped-query attention hold without padding. There a layer loses one head of each of
its groups at a time, in each group the one with the lowest score; these sets of heads compete over the whole model by
their mean scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product

import pandas as pd
import torch
from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError, flag
from headscope.heads import HeadId, Site, SiteLayer
from headscope.pruning.gate_layout import GateLayout, tied_at

Quota = tuple[Tensor, int]
"""Units [n] that compete with each other, and how many of them stay."""
STACKS = {Site.ENCODER_SELF: "encoder", Site.DECODER_SELF: "decoder", Site.CROSS: "decoder"}
"""Sites whose layers have one number of heads in configs of encoder-decoders."""


@dataclass(frozen=True)
class LayerStack:
    """The gated layers of an encoder or decoder: their number, the heads of each, and how many each may keep."""

    name: str
    layers: int
    heads: int
    choices: tuple[int, ...]


def uniform_counts(gating: GateLayout, keep: int) -> Mapping[str, int]:
    """The number of heads that each layer of a stack keeps, by stack, so that `keep` heads stay in all.

    The stacks' shares are as equal as possible. ConfigError, with the nearest numbers, where there is no such split.
    """
    stacks = _stacks(gating)
    totals: dict[int, tuple[float, tuple[int, ...]]] = {}
    for counts in product(*(stack.choices for stack in stacks)):
        total = sum(count * stack.layers for count, stack in zip(counts, stacks, strict=True))
        shares = [count / stack.heads for count, stack in zip(counts, stacks, strict=True)]
        totals[total] = min(totals.get(total, (math.inf, counts)), (max(shares) - min(shares), counts))
    if keep not in totals:
        fewer, more = [total for total in totals if total < keep], [total for total in totals if total > keep]
        nearest = [*sorted(fewer)[-1:], *sorted(more)[:1]]
        possible = " or ".join(map(str, nearest))
        raise ConfigError(f"{flag.keep} {keep} is not as many heads in every layer; keep {possible}")
    return {stack.name: count for stack, count in zip(stacks, totals[keep][1], strict=True)}


def uniform_keep(gating: GateLayout, fraction: float) -> int:
    """The number of heads that stay in all if every layer keeps the `fraction` of its heads, in whole groups."""
    nearest = ((stack, min(stack.choices, key=lambda n: abs(n - fraction * stack.heads))) for stack in _stacks(gating))
    return sum(count * stack.layers for stack, count in nearest)


def uniform_quotas(gating: GateLayout, keep: int) -> list[Quota]:
    """The units of every module [n], and how many of them stay."""
    counts = uniform_counts(gating, keep)
    quotas = []
    for module, (size, n_protected) in _modules(gating).items():
        if module in gating.members:  # otherwise all its heads are protected
            quotas.append((gating.members[module], (counts[STACKS[module[0]]] - n_protected) // size))
    return quotas


def _stacks(gating: GateLayout) -> list[LayerStack]:
    modules, stacks = _modules(gating), []
    for name in dict.fromkeys(STACKS[site] for site, _ in gating.counts):
        counts = [count for (site, _), count in gating.counts.items() if STACKS[site] == name]
        stack_modules = [sizes for (site, _), sizes in modules.items() if STACKS[site] == name]
        choices = tuple(  # whole groups in all modules, and at least the protected heads
            count
            for count in range(1, min(counts) + 1)
            if all(count >= n_protected and (count - n_protected) % size == 0 for size, n_protected in stack_modules)
        )
        if not choices:
            raise ConfigError(
                f"layers of the {name} cannot keep equal numbers of heads, by groups or {flag.protect}; take others"
            )
        stacks.append(LayerStack(name, len(counts), max(counts), choices))
    return stacks


def _modules(gating: GateLayout) -> dict[SiteLayer, tuple[int, int]]:
    """Heads of a unit, and protected heads, of a layer of every module that has gates or protected heads."""
    protected_counts = Counter((head.site, head.layer) for head in gating.protected_heads)
    sizes = {
        module: sum((head.site, head.layer) == module for head in unit)
        for module, unit in zip(gating.modules, gating.units, strict=True)
    }
    return {
        site_layer: (sizes.get(site_layer, 1), protected_counts[site_layer])
        for site_layer in [*sizes, *protected_counts]
    }


def removal_sets(gating: GateLayout, scores: Tensor, remaining: Tensor) -> Tensor:
    """The sets [n u] of `remaining` units [m] that are removed together, by the scores of all units.

    With per-group allocation, the lowest unit of each group of a module are a set, then the second lowest, as long as
    every group has one. Otherwise every unit is a set [n 1].
    """
    if not gating.groups:
        return remaining[:, None]
    sets = list[tuple[int, ...]]()
    lowest_first = sorted(remaining.tolist(), key=lambda unit: float(scores[unit]))
    for module, groups in gating.groups.items():
        by_group: list[list[int]] = [[] for _ in range(groups)]
        for number in lowest_first:
            if gating.modules[number] == module:
                by_group[gating.units[number][0].head * groups // gating.counts[module]].append(number)
        sets += zip(*by_group, strict=False)
    return torch.tensor(sets, dtype=torch.long).view(len(sets), next(iter(gating.groups.values())))


def per_group_quotas(gating: GateLayout, keep: int) -> list[Quota]:
    """All units [n], and how many of them stay; ConfigError, with the nearest numbers, for an impossible `keep`."""
    size, max_sets = _removal_sizes(gating)
    n_sets, remainder = divmod(gating.heads - keep, size)
    if remainder or not 0 <= n_sets <= max_sets:
        nearest = {gating.heads - size * min(max(count, 0), max_sets) for count in (n_sets, n_sets + 1)}
        raise ConfigError(
            f"{flag.keep} {keep} is not as many heads of each group, {size} at a time; "
            f"keep {' or '.join(str(number) for number in sorted(nearest) if number)}"
        )
    heads_of_unit = len(gating.units[0])
    return [(torch.arange(len(gating.units)), len(gating.units) - n_sets * size // heads_of_unit)]


def _removal_sizes(gating: GateLayout) -> tuple[int, int]:
    """The heads of a set that is removed together, and the number of sets; ConfigError where layers differ in size."""
    sizes = {groups * len(unit) for groups in gating.groups.values() for unit in gating.units}
    if len(sizes) != 1:
        raise ConfigError(
            f"{flag.allocate} per-group: layers of these sites have different numbers of groups "
            f"({', '.join(map(str, sorted(sizes)))}); choose {flag.sites} that have one"
        )
    units = len(gating.units)
    return sizes.pop(), len(removal_sets(gating, torch.zeros(units), torch.arange(units)))


def check_keep(gating: GateLayout, keep: int, allocation: str) -> None:
    """Raise ConfigError for a number of heads to keep that an allocation cannot give."""
    QUOTAS[allocation](gating, keep)


def nearest_keep(gating: GateLayout, fraction: float, allocation: str) -> int:
    """The number of heads nearest to a `fraction` of all that an allocation can give; ConfigError where it is 0.

    Without an allocation it is rounded to whole groups, and not less than the protected heads.
    """
    if allocation == "uniform":
        nearest = uniform_keep(gating, fraction)
    elif allocation == "per-group":
        size, max_sets = _removal_sizes(gating)
        nearest = gating.heads - size * min(round((1 - fraction) * gating.heads / size), max_sets)
    else:
        size, n_protected = int(gating.sizes[0]), len(gating.protected_heads)
        nearest = max(n_protected, n_protected + size * round((fraction * gating.heads - n_protected) / size))
    if not nearest:
        raise ConfigError(f"{fraction:g} of {gating.heads} heads are none; take a larger share, or {flag.keep} N")
    return nearest


def _over_all(gating: GateLayout, keep: int) -> list[Quota]:
    return [(torch.arange(len(gating.units)), gating.kept_units(keep))]


def _per_layer(gating: GateLayout, keep: int) -> list[Quota]:
    """The units of every module, and the same share of them that stays, by largest remainders."""
    stay = gating.kept_units(keep)
    if gating.whole_layers and 0 < stay < len(gating.units):
        raise ConfigError(f"{flag.allocate} per-layer: heads of a layer go together here; take global, or per-group")
    members = list(gating.members.values())
    exact = [stay * len(units) / len(gating.units) for units in members]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda number: (counts[number] - exact[number], number))
    for number in by_remainder[: stay - sum(counts)]:
        counts[number] += 1
    return list(zip(members, counts, strict=True))


QUOTAS: Mapping[str, Callable[[GateLayout, int], list[Quota]]] = {
    "global": _over_all,
    "per-layer": _per_layer,
    "uniform": uniform_quotas,
    "per-group": per_group_quotas,
    "measured": _over_all,
}
"""By allocation: groups of units that compete with each other, and how many of each stay."""


@dataclass(frozen=True)
class Ranked:
    """Which units stay [n], their last scores [n], and the step in which each was removed (0: not removed).

    `tied` [n]: the unit stays although one of the same score was removed in that step, or the other way round.
    """

    stays_open: Tensor
    scores: Tensor
    step: Tensor
    tied: Tensor

    def order(self) -> list[int]:
        """Numbers of units, the best first: those that stay, then those removed last, then those removed earlier."""
        lasting = [(step or int(self.step.max()) + 1) for step in self.step.tolist()]
        values = self.scores.tolist()
        return sorted(range(len(values)), key=lambda number: (-lasting[number], -values[number]))

    def table(self, gating: GateLayout) -> pd.DataFrame:
        """A row a gated head, the best first."""
        return gating.ranking(self.order(), score=self.scores, stays_open=self.stays_open, step=self.step)


def rank_heads(
    gating: GateLayout,
    keep: int,
    score: Callable[[list[HeadId]], Scores],
    *,
    steps: int = 1,
    allocation: str = "global",
) -> Ranked:
    """Remove heads until `keep` are left, the lowest scores first, in steps of equal size.

    `score` is called once a step, with the heads removed so far; a unit's score is the mean of its heads'. `allocation`
    is one of `QUOTAS`. Ties are broken by site, layer and head.
    """
    units = len(gating.units)
    remaining, quota = torch.ones(units, dtype=torch.bool), QUOTAS[allocation](gating, keep)
    scores, step = torch.zeros(units, dtype=torch.float64), torch.zeros(units, dtype=torch.long)
    ties: list[Tensor] = []
    for number in range(1, steps + 1):
        unit_scores = _unit_scores(gating, score(gating.closed_heads(remaining)), remaining)
        scores[remaining] = unit_scores[remaining]
        for members, stay in quota:
            sets = removal_sets(gating, scores, members[remaining[members]])  # [n u]
            values, size = scores[sets].mean(dim=1), sets.shape[1]
            n_removed = round((len(members) - stay) // size * number / steps)  # sets, after this step
            n_kept = len(sets) + int((~remaining[members]).sum()) // size - n_removed
            ties.append(sets[tied_at(values, n_kept)].flatten())
            removed = sets[torch.argsort(values, descending=True, stable=True)[n_kept:]].flatten()
            remaining[removed], step[removed] = False, number
    tied = torch.zeros(units, dtype=torch.bool)
    for equals in ties:
        tied[equals] |= remaining[equals].any() & ~remaining[equals].all()
    return Ranked(remaining, scores, step, tied)


def _unit_scores(gating: GateLayout, scores: Scores, remaining: Tensor) -> Tensor:
    """The mean score [n] of each unit's heads, 0 for units that are removed; ConfigError for a head without a score."""
    means = torch.zeros(len(gating.units), dtype=torch.float64)
    for number in remaining.nonzero()[:, 0].tolist():
        values = [scores.get(head, float("nan")) for head in gating.units[number]]
        means[number] = sum(values) / len(values)
    if missing := [unit[0] for unit, mean in zip(gating.units, means.tolist(), strict=True) if math.isnan(mean)]:
        problem = f"{len(missing)} of {len(means)} heads have no score, such as {missing[0]}"
        raise ConfigError(f"{problem}; choose {flag.sites} with scores, another criterion, or give {flag.target}")
    return means
