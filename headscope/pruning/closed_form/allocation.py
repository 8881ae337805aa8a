"""A lazy greedy search for the heads to remove, by the model's loss after output projections are refitted.

Candidates are single units, and all remaining units of an attention module together; costs are per unit. One heap has
candidates by their estimated costs, scaled by the ratio of measured to estimated costs so far; another has candidates
by the last measured cost. In every step the first ones are measured with their modules refitted, until no other can be
cheaper (lazy evaluation, Minoux 1978) or `TRIES` are measured; the cheapest is removed.
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
"""The most candidates that are measured in a step."""
MODULE = -1
"""In place of a unit's number: all remaining units of its module."""
TIE = 1e-9
"""The least difference of successive scores, even if the damage does not grow."""


class Cut(NamedTuple):
    """A candidate: a unit of a module, or `MODULE`, and its cost per unit."""

    cost: float
    module: int
    unit: int


@dataclass(eq=False)
class MeasuredAllocation:
    """Removes units from a copy of a model, the cheapest first, by the mean damage on the texts of `meters`.

    Only units with `estimates` of their cost (in units of the damage) are candidates. Those with an estimate of 0 are
    all measured before any unit is removed.
    """

    meters: Sequence[DamageMeter]
    moments: Moments
    projections: Sequence[OutputProjection]
    estimates: Mapping[Unit, float]
    options: Refit

    def __post_init__(self) -> None:
        self.trial = RefittedCopy(self.meters[0].checkpoint, self.projections)
        self.shared = SharedLayers.for_texts(self.trial.model, len(self.meters))
        self.remaining = [
            [number for number, unit in enumerate(projection.units) if unit in self.estimates]
            for projection in self.projections
        ]
        self.removed_units: list[list[int]] = [[] for _ in self.projections]
        self.scores: dict[HeadId, float] = {}
        self.damage, self.passes = 0.0, 0
        self.estimate_sum, self.cost_sum = 0.0, 0.0
        self.estimated_cuts, self.measured_cuts = list[Cut](), list[Cut]()
        for number, units in enumerate(self.remaining):
            costs = [self.estimates[self.projections[number].units[unit]] for unit in units]
            self.estimated_cuts += [Cut(cost, number, unit) for cost, unit in zip(costs, units, strict=True)]
            if len(costs) > 1:
                self.estimated_cuts.append(Cut(fmean(costs), number, MODULE))
        heapq.heapify(self.estimated_cuts)

    def take(self, heads: int, *, progress: Progress = no_progress) -> dict[HeadId, float]:
        """Remove `heads` heads; returns scores of all: the damage when a head and all earlier ones are removed.

        Scores of the remaining heads are higher, in the order of their last known costs.
        """
        too_large, passes = list[tuple[list[Cut], Cut]](), self.max_passes(heads)
        with progress(f"measuring, at most {passes} times", passes) as step:
            while len(self.scores) < heads and (cut := self._cheapest(heads - len(self.scores), too_large, step)):
                self._remove(cut, self._units(cut))
        for cuts, cut in too_large:
            heapq.heappush(cuts, cut)
        scores, score = dict(self.scores), max(self.scores.values(), default=0.0)
        for cut in [*sorted(self.measured_cuts), *sorted(self.estimated_cuts)]:
            if cut.unit != MODULE and self._units(cut):
                score += TIE
                scores.update(dict.fromkeys(self.projections[cut.module].units[cut.unit], score))
        return scores

    def max_passes(self, heads: int) -> int:
        """The largest possible number of measurements until `heads` heads are removed."""
        sizes = [
            len(self.projections[number].units[unit]) for number, units in enumerate(self.remaining) for unit in units
        ]
        unknown = sum(not cut.cost for cut in self.estimated_cuts)
        return unknown + TRIES * -(-(heads - len(self.scores)) // max(min(sizes, default=1), 1))

    def _cheapest(self, heads: int, too_large: list[tuple[list[Cut], Cut]], step: Step) -> Cut | None:
        """Measure the most promising cuts and return the cheapest; modules with more than `heads` go to `too_large`."""
        measured, tries = list[Cut](), 0
        while tries < TRIES:
            heap = min(self.estimated_cuts, self.measured_cuts, key=self._bound)
            if not heap or (measured and measured[0].cost <= self._bound(heap)):
                break
            cut = heapq.heappop(heap)
            units = self._units(cut)
            if cut.unit == MODULE and self._count_heads(cut.module, units) > heads:
                too_large.append((heap, cut))
            elif units:
                cost = (self._measure(cut.module, units) - self.damage) / len(units)
                if heap is self.estimated_cuts:
                    self.estimate_sum, self.cost_sum = self.estimate_sum + cut.cost, self.cost_sum + max(cost, 0.0)
                tries += bool(cut.cost)  # cuts with an estimate of 0 do not count, so that all are measured
                heapq.heappush(measured, cut._replace(cost=cost))
                step(1)
        cheapest = heapq.heappop(measured) if measured else None
        self.measured_cuts += measured
        heapq.heapify(self.measured_cuts)
        return cheapest

    def _bound(self, cuts: Sequence[Cut]) -> float:
        """A lower bound of the cost of a heap's first cut: measured, or a scaled estimate; -∞ for an estimate of 0."""
        if not cuts:
            return math.inf
        cost = cuts[0].cost
        if cuts is self.measured_cuts or not self.estimate_sum > 0:
            return cost or -math.inf
        return cost * min(self.cost_sum / self.estimate_sum, 1.0) or -math.inf

    def _units(self, cut: Cut) -> list[int]:
        """The remaining units of a cut; none of a module with one unit, which is a candidate by itself."""
        remaining = self.remaining[cut.module]
        if cut.unit == MODULE:
            return remaining if len(remaining) > 1 else []
        return [cut.unit] if cut.unit in remaining else []

    def _count_heads(self, number: int, units: Sequence[int]) -> int:
        return sum(len(self.projections[number].units[unit]) for unit in units)

    def _refit(self, number: int, units: Sequence[int]) -> SolvedRefit:
        """The refit of a module without some units."""
        projection = self.projections[number]
        heads = [head for unit in units for head in projection.units[unit]]
        return solve_refit(projection, reached_moments(self.moments, projection), heads, self.options)

    def _measure(self, number: int, units: Sequence[int]) -> float:
        """The damage with some more units of a module removed."""
        projection = self.projections[number]
        self.passes += 1
        with self.trial.with_refit(projection, self._refit(number, [*self.removed_units[number], *units])):
            return fmean(
                meter.measure(self.trial.model, layers=layers, site_layers=projection.site_layers).damage
                for meter, layers in zip(self.meters, self.shared, strict=True)
            )

    def _remove(self, cut: Cut, units: Sequence[int]) -> None:
        """Remove the units of a cut from the copy, and score their heads."""
        projection = self.projections[cut.module]
        self.removed_units[cut.module] += units
        self.remaining[cut.module] = [unit for unit in self.remaining[cut.module] if unit not in units]
        self.trial.put(projection, self._refit(cut.module, self.removed_units[cut.module]))
        for layers in filter(None, self.shared):
            layers.forget(projection.site_layers)
        self.damage += cut.cost * len(units)
        last_score = max(self.scores.values(), default=0.0)
        for number, unit in enumerate(units, start=1):
            self.scores.update(dict.fromkeys(projection.units[unit], max(self.damage, last_score) + number * TIE))
