"""The sentence vector of an encoder by its distance to the intact model's."""

from __future__ import annotations

from torch import Tensor

from headscope.attribution.objectives.base import objective
from headscope.attribution.objectives.states import StateObjective
from headscope.evaluation.states import mean_pooled, relative_l2


@objective
class RepresentationL2(StateObjective):
    """As `representation`, but the damage is ‖v' − v‖ / ‖v‖: it sees lengths, too."""

    name = "representation-l2"
    summary = "mean-pooled final state, relative l2 distance for ablations"

    def compared(self, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return mean_pooled(states, real)[:, None], real.any(dim=-1).long()

    def distance(self, intact: Tensor, altered: Tensor, counts: Tensor) -> Tensor:
        return relative_l2(intact, altered).sum(dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The relative distance to the intact model."""
        return damage
