"""The final states of all tokens, for models whose users read each of them."""

from __future__ import annotations

from torch import Tensor

from headscope.attribution.objectives.base import objective
from headscope.attribution.objectives.states import StateObjective, every_token
from headscope.evaluation.states import cosine


@objective
class TokenRepresentation(StateObjective):
    """The final states of all real tokens, special ones too; the damage of a token is 1 − cos to the intact model."""

    name = "token-representation"
    summary = "final states of all tokens, cosine distance for ablations"

    def compared(self, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return every_token(states, real)

    def distance(self, intact: Tensor, altered: Tensor, counts: Tensor) -> Tensor:
        return counts - cosine(intact, altered).sum(dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The mean cosine to the intact model."""
        return 1 - damage
