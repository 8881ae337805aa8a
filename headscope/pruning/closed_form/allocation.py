"""Which heads go, by what the model loses once the output projections are refitted: a lazy greedy search.

Candidates are single units and, together, all that is left of an attention module, at the price of its units. Heaps
order them by estimates, times the ratio of what was measured to what was estimated so far, and by what they were last
measured to cost. The cheapest is measured with its module refitted, and pushed back; it goes when it is still first
(lazy evaluation, Minoux 1978).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from headscope.heads import HeadId
from headscope.pruning.closed_form.compensate import RefittedCopy, reached, solve_refit
from headscope.pruning.closed_form.damage import DamageMeter, SharedLayers
from headscope.pruning.closed_form.moments import ModuleMoments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.refit import SolvedRefit
from headscope.pruning.gate_layout import Unit
from headscope.pruning.options.shared import RefitOptions

PASSES = 2
"""Measurements for every unit that goes, at most; when they are used up, the last known costs decide."""
MODULE = -1
"""In the place of a unit: all that is left of its module."""
TIE = 1e-9
"""By how much a score is above the one before it where the damage did not grow."""


class Cut(NamedTuple):
    """A unit of a module, or all of it, what it costs a unit, and how many were made before it was measured."""

    cost: float
    module: int
    unit: int
    measured_after: int = -1


class MeasuredAllocation:
    """Takes units out of a copy of a model, the cheapest first, by the mean damage on the texts of `meters`.

    Only units with `estimates` of their cost alone, in the unit of the damage, may go. Those that are estimated at
    nothing are measured before any goes.
    """

    def __init__(
        self,
        meters: Sequence[DamageMeter],
        moments: ModuleMoments,
        projections: Sequence[OutputProjection],
        estimates: Mapping[Unit, float],
        options: RefitOptions,
    ) -> None:
        self.meters, self.moments, self.projections, self.options = meters, moments, projections, options
        self.trial = RefittedCopy(meters[0].checkpoint, projections)
        self.shared = [SharedLayers.of(self.trial.model) for _ in meters]
        self.left = [
            [unit for unit, heads in enumerate(projection.units) if heads in estimates] for projection in projections
        ]
        self.gone: list[list[int]] = [[] for _ in projections]
        self.scores: dict[HeadId, float] = {}
        self.damage, self.cuts, self.passes = 0.0, 0, 0
        self.estimated, self.measured = 0.0, 0.0
        self.untried, self.tried = list[Cut](), list[Cut]()
        for number, units in enumerate(self.left):
            costs = [estimates[projections[number].units[unit]] for unit in units]
            self.untried += [Cut(cost, number, unit) for cost, unit in zip(costs, units, strict=True)]
            if len(costs) > 1:
                self.untried.append(Cut(fmean(costs), number, MODULE))
        heapq.heapify(self.untried)

    def take(self, heads: int, *, step: Callable[[int], None] = lambda count: None) -> dict[HeadId, float]:
        """Scores of all heads, once so many are gone: the damage with a head and all before it gone.

        The others follow in the order of their last known costs. `step` is called after every measurement.
        """
        budget = self.passes + self.most_passes(heads)
        set_aside = list[Cut]()
        while len(self.scores) < heads and (self.untried or self.tried):
            cut = self._cheapest()
            units = self._units(cut)
            if not units:
                continue
            is_stale, size = cut.measured_after < self.cuts, self._count(cut.module, units)
            if cut.unit == MODULE and (len(self.scores) + size > heads or (is_stale and self.passes >= budget)):
                set_aside.append(cut)
            elif is_stale and self.passes < budget:
                cost = (self._measure(cut.module, units) - self.damage) / len(units)
                if cut.measured_after < 0:
                    self.estimated, self.measured = self.estimated + cut.cost, self.measured + max(cost, 0.0)
                heapq.heappush(self.tried, Cut(cost, cut.module, cut.unit, self.cuts))
                step(1)
            else:
                self._remove(cut, units)
        for cut in set_aside:
            heapq.heappush(self.untried if cut.measured_after < 0 else self.tried, cut)
        return self.scores | self._scores_of_others()

    def most_passes(self, heads: int) -> int:
        """How many measurements it takes at most until so many heads are gone: unknown ones and a few a unit."""
        sizes = [len(self.projections[number].units[unit]) for number, units in enumerate(self.left) for unit in units]
        unknown = sum(not cut.cost for cut in self.untried)
        return unknown + PASSES * -(-(heads - len(self.scores)) // max(min(sizes, default=1), 1))

    def _cheapest(self) -> Cut:
        """The cut at the top of both heaps, estimates scaled by what came of earlier ones."""
        scale = self.measured / self.estimated if self.estimated > 0 else 1.0
        estimate = self.untried[0].cost if self.untried else math.inf
        is_next = not self.tried or not estimate or min(scale, 1.0) * estimate < self.tried[0].cost
        return heapq.heappop(self.untried if is_next else self.tried)

    def _units(self, cut: Cut) -> list[int]:
        """What of a cut is left; nothing of a module that has one unit left, which is a cut of its own."""
        left = self.left[cut.module]
        if cut.unit == MODULE:
            return left if len(left) > 1 else []
        return [cut.unit] if cut.unit in left else []

    def _count(self, number: int, units: Sequence[int]) -> int:
        return sum(len(self.projections[number].units[unit]) for unit in units)

    def _refit(self, number: int, units: Sequence[int]) -> SolvedRefit:
        projection = self.projections[number]
        heads = [head for unit in units for head in projection.units[unit]]
        return solve_refit(projection, reached(self.moments, projection), heads, self.options)

    def _measure(self, number: int, units: Sequence[int]) -> float:
        """The damage with these units gone too."""
        projection = self.projections[number]
        self.passes += 1
        with self.trial.with_refit(projection, self._refit(number, [*self.gone[number], *units])):
            return fmean(
                meter.measure(self.trial.model, layers=layers, places=projection.places).damage
                for meter, layers in zip(self.meters, self.shared, strict=True)
            )

    def _remove(self, cut: Cut, units: Sequence[int]) -> None:
        projection = self.projections[cut.module]
        self.gone[cut.module] += units
        self.left[cut.module] = [unit for unit in self.left[cut.module] if unit not in units]
        self.trial.put(projection, self._refit(cut.module, self.gone[cut.module]))
        for layers in filter(None, self.shared):
            layers.forget(projection.places)
        self.cuts += 1
        self.damage += cut.cost * len(units)
        before = max(self.scores.values(), default=0.0)
        for number, unit in enumerate(units, start=1):
            self.scores.update(dict.fromkeys(projection.units[unit], max(self.damage, before) + number * TIE))

    def _scores_of_others(self) -> dict[HeadId, float]:
        worst, scores = max(self.scores.values(), default=0.0), dict[HeadId, float]()
        for cut in [*sorted(self.tried), *sorted(self.untried)]:
            if cut.unit != MODULE and self._units(cut):
                worst += TIE
                scores.update(dict.fromkeys(self.projections[cut.module].units[cut.unit], worst))
        return scores
