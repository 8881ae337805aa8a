"""The final states of all tokens by their distance to the intact model's."""

from __future__ import annotations

from torch import Tensor

from headscope.attribution.objectives.base import objective
from headscope.attribution.objectives.states import StateObjective, every_token
from headscope.evaluation.states import relative_l2


@objective
class TokenRepresentationL2(StateObjective):
    """As `token-representation`, but the damage of a token is ‖v' − v‖ / ‖v‖."""

    name = "token-representation-l2"
    summary = "final states of all tokens, relative l2 distance for ablations"

    def compared(self, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return every_token(states, real)

    def distance(self, intact: Tensor, altered: Tensor, counts: Tensor) -> Tensor:
        return relative_l2(intact, altered).sum(dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The mean relative distance to the intact model."""
        return damage
