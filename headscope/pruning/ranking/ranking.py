"""Which heads stay by their scores: one-shot or in steps, over the whole model or layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError, flag
from headscope.heads import HeadId, Site
from headscope.pruning.gate_layout import GateLayout, tied_at
from headscope.pruning.ranking.allocation import QUOTAS, removal_sets


@dataclass(frozen=True)
class Ranked:
    """Which units stay [n], the scores [n] that each was last judged by, and the step that took it out (0: none).

    `tied` [n] are those that stay, or went, while others of the same score in the same step did not.
    """

    stays_open: Tensor
    scores: Tensor
    step: Tensor
    tied: Tensor

    def order(self) -> list[int]:
        """Units, the best first: those that stay, then the later ones to go before the earlier ones."""
        last = [(-step if step else -int(self.step.max()) - 1) for step in self.step.tolist()]
        values = self.scores.tolist()
        return sorted(range(len(values)), key=lambda number: (last[number], -values[number]))

    def table(self, gating: GateLayout) -> pd.DataFrame:
        """A row a gated head, the best first."""
        scores, step = self.scores.tolist(), self.step.tolist()
        return gating.ranking(self.order(), score=scores, stays_open=self.stays_open, step=step)


def rank_heads(
    gating: GateLayout,
    keep: int,
    score: Callable[[list[HeadId]], Scores],
    *,
    steps: int = 1,
    allocation: str = "global",
) -> Ranked:
    """Take heads out until `keep` are left, the lowest scores first, equal parts in every step.

    `score` is asked once a step, with the heads that are gone by then; a unit's score is the mean of its heads'.
    `allocation` is one of `QUOTAS`. Ties go by site, layer and head.
    """
    units = len(gating.units)
    remaining, quota = torch.ones(units, dtype=torch.bool), QUOTAS[allocation](gating, keep)
    scores, step = torch.zeros(units, dtype=torch.float64), torch.zeros(units, dtype=torch.long)
    ties: list[Tensor] = []
    for number in range(1, steps + 1):
        unit_scores = _of_units(gating, score(gating.closed_heads(remaining)), remaining)
        scores[remaining] = unit_scores[remaining]
        for members, stay in quota:
            sets = removal_sets(gating, scores, members[remaining[members]])  # [n u]
            values, size = scores[sets].mean(dim=1), sets.shape[1]
            going = round((len(members) - stay) // size * number / steps)
            goal = len(sets) + int((~remaining[members]).sum()) // size - going
            ties.append(sets[tied_at(values, goal)].flatten())
            units_gone = sets[torch.argsort(values, descending=True, stable=True)[goal:]].flatten()
            remaining[units_gone], step[units_gone] = False, number
    tied = torch.zeros(units, dtype=torch.bool)
    for alike in ties:
        tied[alike] |= remaining[alike].any() & ~remaining[alike].all()
    return Ranked(remaining, scores, step, tied)


def _of_units(gating: GateLayout, scores: Scores, remaining: Tensor) -> Tensor:
    means = torch.zeros(len(gating.units), dtype=torch.float64)
    for number in remaining.nonzero()[:, 0].tolist():
        values = [scores.get(head, float("nan")) for head in gating.units[number]]
        means[number] = sum(values) / len(values)
    if bool(means.isnan().any()):
        unscored_heads = [gating.units[number][0] for number in means.isnan().nonzero()[:, 0].tolist()]
        units = dict(zip((unit[0] for unit in gating.units), means.isnan().tolist(), strict=True))
        sites = dict.fromkeys(head.site for head in unscored_heads)
        sites_with_scores = [site for site in dict.fromkeys(head.site for head in units) if site not in sites]
        if Site.ENCODER_SELF in sites_with_scores and all(
            missing for head, missing in units.items() if head.site in sites
        ):
            raise ConfigError(
                f"{len(unscored_heads)} of {len(means)} heads, those of {' and '.join(sites)}, are measured on "
                f"translations only; give {flag.target}, or {flag.sites} {','.join(sites_with_scores)}"
            )
        raise ConfigError(
            f"{len(unscored_heads)} of {len(means)} heads have no score, as {unscored_heads[0]}; choose {flag.sites} "
            "that were measured, or another criterion"
        )
    return means
