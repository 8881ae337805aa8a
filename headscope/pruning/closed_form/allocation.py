"""A lazy greedy search for the heads to remove, by the model's loss after output projections are refitted.

Candidates are single units and, together, all that is left of an attention module, at the price of its units. Heaps
order them by estimates, times the ratio of what was measured to what was estimated so far, and by what they were last
measured to cost. In every step the first are measured with their modules refitted, until none that follows can be
cheaper (lazy evaluation, Minoux 1978) or enough are measured; the cheapest of them goes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from headscope.heads import HeadId
from headscope.model.prefix_cache import SharedLayers
from headscope.progress import Progress, Step, no_progress
from headscope.pruning.closed_form.compensate import RefittedCopy, reached_moments, solve_refit
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.moments import Moments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.refit import SolvedRefit
from headscope.pruning.gate_layout import Unit
from headscope.pruning.options.shared import Refit

TRIES = 4
"""Candidates that are measured in a step, at most."""
MODULE = -1
"""In the place of a unit: all that is left of its module."""
TIE = 1e-9
"""By how much a score is above the one before it where the damage did not grow."""


class Cut(NamedTuple):
    """A unit of a module, or all of it, and what it costs a unit."""

    cost: float
    module: int
    unit: int


@dataclass(eq=False)
class MeasuredAllocation:
    """Takes units out of a copy of a model, the cheapest first, by the mean damage on the texts of `meters`.

    Only units with `estimates` of their cost alone, in the unit of the damage, may go. Those that are estimated at
    nothing are measured before any goes.
    """

    meters: Sequence[DamageMeter]
    moments: Moments
    projections: Sequence[OutputProjection]
    estimates: Mapping[Unit, float]
    options: Refit

    def __post_init__(self) -> None:
        self.trial = RefittedCopy(self.meters[0].checkpoint, self.projections)
        self.shared = [SharedLayers.of(self.trial.model) for _ in self.meters]
        self.units_left = [
            [number for number, unit in enumerate(projection.units) if unit in self.estimates]
            for projection in self.projections
        ]
        self.removed_units: list[list[int]] = [[] for _ in self.projections]
        self.scores: dict[HeadId, float] = {}
        self.damage, self.passes = 0.0, 0
        self.estimate_sum, self.cost_sum = 0.0, 0.0
        self.estimated_cuts, self.measured_cuts = list[Cut](), list[Cut]()
        for number, units in enumerate(self.units_left):
            costs = [self.estimates[self.projections[number].units[unit]] for unit in units]
            self.estimated_cuts += [Cut(cost, number, unit) for cost, unit in zip(costs, units, strict=True)]
            if len(costs) > 1:
                self.estimated_cuts.append(Cut(fmean(costs), number, MODULE))
        heapq.heapify(self.estimated_cuts)

    def take(self, heads: int, *, progress: Progress = no_progress) -> dict[HeadId, float]:
        """Remove so many heads; returns scores of all: the damage with a head and all before it removed.

        The others follow in the order of their last known costs. The `progress` says how many measurements it may take.
        """
        too_large, passes = list[tuple[list[Cut], Cut]](), self.max_passes(heads)
        with progress(f"measuring, at most {passes} times", passes) as step:
            while len(self.scores) < heads and (cut := self._cheapest(heads - len(self.scores), too_large, step)):
                self._remove(cut, self._units(cut))
        for cuts, cut in too_large:
            heapq.heappush(cuts, cut)
        scores, worst = dict(self.scores), max(self.scores.values(), default=0.0)
        for cut in [*sorted(self.measured_cuts), *sorted(self.estimated_cuts)]:
            if cut.unit != MODULE and self._units(cut):
                worst += TIE
                scores.update(dict.fromkeys(self.projections[cut.module].units[cut.unit], worst))
        return scores

    def max_passes(self, heads: int) -> int:
        """The largest number of measurements until so many heads are removed."""
        sizes = [
            len(self.projections[number].units[unit]) for number, units in enumerate(self.units_left) for unit in units
        ]
        unknown = sum(not cut.cost for cut in self.estimated_cuts)
        return unknown + TRIES * -(-(heads - len(self.scores)) // max(min(sizes, default=1), 1))

    def _cheapest(self, heads: int, too_large: list[tuple[list[Cut], Cut]], step: Step) -> Cut | None:
        """Measure the most promising cuts; returns the cheapest. Modules of more than `heads` join `too_large`."""
        queue, tries = list[Cut](), 0
        while tries < TRIES:
            first = min(self.estimated_cuts, self.measured_cuts, key=self._bound)
            if not first or (queue and queue[0].cost <= self._bound(first)):
                break
            cut = heapq.heappop(first)
            units = self._units(cut)
            if cut.unit == MODULE and self._count(cut.module, units) > heads:
                too_large.append((first, cut))
            elif units:
                cost = (self._measure(cut.module, units) - self.damage) / len(units)
                if first is self.estimated_cuts:
                    self.estimate_sum, self.cost_sum = self.estimate_sum + cut.cost, self.cost_sum + max(cost, 0.0)
                tries += bool(cut.cost)
                heapq.heappush(queue, cut._replace(cost=cost))
                step(1)
        cheapest = heapq.heappop(queue) if queue else None
        self.measured_cuts += queue
        heapq.heapify(self.measured_cuts)
        return cheapest

    def _bound(self, cuts: Sequence[Cut]) -> float:
        """The known or estimated cost of the first cut of a heap; an estimate of 0 comes first."""
        if not cuts:
            return math.inf
        cost = cuts[0].cost
        if cuts is self.measured_cuts or not self.estimate_sum > 0:
            return cost or -math.inf
        return cost * min(self.cost_sum / self.estimate_sum, 1.0) or -math.inf

    def _units(self, cut: Cut) -> list[int]:
        """The remaining units of a cut; none of a module with one unit left, which is a cut of its own."""
        units_left = self.units_left[cut.module]
        if cut.unit == MODULE:
            return units_left if len(units_left) > 1 else []
        return [cut.unit] if cut.unit in units_left else []

    def _count(self, number: int, units: Sequence[int]) -> int:
        return sum(len(self.projections[number].units[unit]) for unit in units)

    def _refit(self, number: int, units: Sequence[int]) -> SolvedRefit:
        projection = self.projections[number]
        heads = [head for unit in units for head in projection.units[unit]]
        return solve_refit(projection, reached_moments(self.moments, projection), heads, self.options)

    def _measure(self, number: int, units: Sequence[int]) -> float:
        projection = self.projections[number]
        self.passes += 1
        with self.trial.with_refit(projection, self._refit(number, [*self.removed_units[number], *units])):
            return fmean(
                meter.measure(self.trial.model, layers=layers, places=projection.places).damage
                for meter, layers in zip(self.meters, self.shared, strict=True)
            )

    def _remove(self, cut: Cut, units: Sequence[int]) -> None:
        projection = self.projections[cut.module]
        self.removed_units[cut.module] += units
        self.units_left[cut.module] = [unit for unit in self.units_left[cut.module] if unit not in units]
        self.trial.put(projection, self._refit(cut.module, self.removed_units[cut.module]))
        for layers in filter(None, self.shared):
            layers.forget(projection.places)
        self.damage += cut.cost * len(units)
        before = max(self.scores.values(), default=0.0)
        for number, unit in enumerate(units, start=1):
            self.scores.update(dict.fromkeys(projection.units[unit], max(self.damage, before) + number * TIE))
