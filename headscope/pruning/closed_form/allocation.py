"""How many heads each module loses: chosen by the objective that is measured after refitting.

Inside a module the order is given (greedy block OBS is nearly the best there); what an error of a module's output
costs at the end of the model is not known from the module alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, MutableMapping, Sequence
from statistics import fmean

from headscope.heads import HeadId
from headscope.pruning.closed_form.compensate import RefittedCopy, reached, refit_module
from headscope.pruning.closed_form.damage import DamageMeter
from headscope.pruning.closed_form.moments import ModuleMoments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.refit import SolvedRefit
from headscope.pruning.options.refit import RefitOptions

ModuleOrder = tuple[OutputProjection, Sequence[int]]
"""A module, and its units in the order in which they go."""
MEASURED = 128
"""Sentences of the calibration text that the objective is measured on."""
TIE = 1e-9
"""By how much a score is above the one before it where the damage did not grow."""


def measured_allocation(
    meters: Sequence[DamageMeter],
    moments: ModuleMoments,
    orders: Sequence[ModuleOrder],
    options: RefitOptions | None = None,
    *,
    step: Callable[[int], None] = lambda count: None,
    known: MutableMapping[str, float] | None = None,
) -> dict[HeadId, float]:
    """The damage once a head and all before it are gone and the rest is refitted; next goes what does least damage.

    Greedy over modules: each step takes the next unit of the module that does the least damage, as the objective
    measures it on the texts of `meters` (their mean) with all refits in place. A module is measured again only when it
    is the cheapest by what was measured before (lazy evaluation, Minoux 1978): exact as long as no removal makes
    another cheaper. Scores are made to rise, for the damage itself can fall. `step` is called after every unit. What is
    measured is put into `known`, by how many units of every module are gone; what is there already is not measured.
    """
    refits = _Refits(moments, orders, options or RefitOptions())
    known = {} if known is None else known
    trial = RefittedCopy(meters[0].checkpoint, [projection for projection, _ in orders])
    gone, damage, scores = [0] * len(orders), 0.0, {}

    def measured(number: int) -> float:
        """The damage with one more unit of a module gone."""
        state = " ".join(str(count + (other == number)) for other, count in enumerate(gone))
        if state not in known:
            for other, count in enumerate(gone):
                trial.put(orders[other][0], refits.of(other, count + (other == number)))
            known[state] = fmean(meter.measure(trial.model).damage for meter in meters)
        return known[state]

    waiting = [(measured(number), number, 0) for number, (_, units) in enumerate(orders) if units]
    heapq.heapify(waiting)
    worst, taken = 0.0, 0
    while waiting:
        after, number, at = heapq.heappop(waiting)
        if at < taken:
            heapq.heappush(waiting, (measured(number), number, taken))
            continue
        projection, units = orders[number]
        growth, damage = after - damage, after
        waiting = [(cost + growth, other, when) for cost, other, when in waiting]
        unit = projection.units[units[gone[number]]]
        gone[number] += 1
        taken += 1
        worst = max(damage, worst + TIE)
        scores.update(dict.fromkeys(unit, worst))
        step(1)
        if gone[number] < len(units):
            heapq.heappush(waiting, (measured(number), number, taken))
    return scores


class _Refits:
    """Refits of every module with its first units gone, each made once."""

    def __init__(self, moments: ModuleMoments, orders: Sequence[ModuleOrder], options: RefitOptions) -> None:
        self.moments, self.orders, self.options = moments, orders, options
        self.made: dict[tuple[int, int], SolvedRefit] = {}

    def of(self, number: int, count: int) -> SolvedRefit:
        """The refit of module `number` with `count` units gone; the last two of a module are kept."""
        if (number, count) not in self.made:
            projection, units = self.orders[number]
            heads = [head for unit in units[:count] for head in projection.units[unit]]
            self.made.pop((number, count - 2), None)
            self.made[number, count] = refit_module(
                projection, reached(self.moments, projection), heads, self.options
            ).refit
        return self.made[number, count]
