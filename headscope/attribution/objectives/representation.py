"""What encoders give their users: the mean-pooled final state of a sentence, or the final states of its tokens."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, objective
from headscope.data.encoded import Batch
from headscope.evaluation.metrics.states import cosine, relative_l2
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise
from headscope.model.forward import Pool


class FinalStates(Objective):
    """Is about final states [b t d], for models that predict nothing, and for all others.

    The last stack that runs is read: the decoder where there is one and a target, else the encoder.
    """

    trains = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        return checkpoint.states(batch)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        real = (batch.source if batch.target is None else batch.target).real
        return self.project(precise(output), real, aim, checkpoint.pool)

    @abstractmethod
    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        """The projection of what is compared on its own direction, which is held constant, or on `aim`."""


@objective
class Representation(FinalStates):
    """The mean-pooled final state of a sentence, for models that predict nothing.

    The mean is over all real positions, special ones too; a sentence-transformers model pools as its files say. The
    value is the projection of that vector on its own direction, which is held constant: its gradient is the norm's. The
    damage is the cosine distance to the intact vector, 1 − cos, in [0, 2]; with the intact direction as `aim`
    [b d] an altered model's value is the projection of its mean on that.
    """

    name = "representation"
    summary = "mean-pooled final state: its length along its own direction, cosine distance for ablations"
    damage_words = "cosine distance"
    compares = True

    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        mean = pool(states, real)
        direction = torch.nn.functional.normalize(mean.detach(), dim=-1) if aim is None else aim
        values = (mean * direction).sum(dim=-1)
        return ObjectiveOutput(values, torch.ones_like(values), direction, mean)

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        """1 − cos of the two vectors [b]."""
        assert intact.vector is not None and changed_output.vector is not None
        return 1 - torch.nn.functional.cosine_similarity(intact.vector, changed_output.vector, dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The cosine to the intact model."""
        return 1 - damage


class StateDistance(FinalStates):
    """The projections of several states on their own directions, summed over a sentence; `aim` [b n d] are these.

    The damage compares states with the intact model's one by one by their relative l2 distance ‖v' − v‖ / ‖v‖, unless a
    subclass says otherwise; counts are states, so that its mean is over all states of the corpus. Those at padding are
    zero.
    """

    def select(self, states: Tensor, real: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
        """What is compared [b n d] of final states [b t d] at real positions [b t], and how many they are [b]."""
        return states * real[..., None], real.sum(dim=-1)

    def project(self, states: Tensor, real: Tensor, aim: Tensor | None, pool: Pool) -> ObjectiveOutput:
        states, counts = self.select(states, real, pool)
        directions = torch.nn.functional.normalize(states.detach(), dim=-1) if aim is None else aim
        return ObjectiveOutput((states * directions).sum(dim=(1, 2)), counts, directions, states=states)

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        assert intact.states is not None and changed_output.states is not None
        return relative_l2(intact.states, changed_output.states).sum(dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The mean relative distance to the intact model."""
        return damage


@objective
class RepresentationL2(StateDistance):
    """As `representation`, but the damage is ‖v' − v‖ / ‖v‖: it sees lengths, too."""

    name = "representation-l2"
    summary = "mean-pooled final state, relative l2 distance for ablations"
    damage_words = "relative l2 distance"

    def select(self, states: Tensor, real: Tensor, pool: Pool) -> tuple[Tensor, Tensor]:
        return pool(states, real)[:, None], real.any(dim=-1).long()


@objective
class TokenRepresentationL2(StateDistance):
    """As `token-representation`, but the damage of a token is ‖v' − v‖ / ‖v‖."""

    name = "token-representation-l2"
    summary = "final states of all tokens, relative l2 distance for ablations"
    damage_words = "relative l2 distance of tokens"


@objective
class TokenRepresentation(StateDistance):
    """The final states of all real tokens, special ones too; the damage of a token is 1 − cos to the intact model."""

    name = "token-representation"
    summary = "final states of all tokens, cosine distance for ablations"
    damage_words = "cosine distance of tokens"

    def damage(self, intact: ObjectiveOutput, changed_output: ObjectiveOutput) -> Tensor:
        assert intact.states is not None and changed_output.states is not None
        return intact.counts - cosine(intact.states, changed_output.states).sum(dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The mean cosine to the intact model."""
        return 1 - damage
