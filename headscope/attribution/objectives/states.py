"""What objectives share that compare several states of a sentence with those of the intact model, or by distance."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput
from headscope.attribution.objectives.predictions import precise
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint


class StateObjective(Objective):
    """The projection of states on their own directions, which are held constant, summed over a sentence.

    `aim` [b n d] are these directions. The damage compares states with the intact model's one by one, as a subclass
    says; counts are states, so that its mean is over all states of the corpus. States at padding are zero.
    """

    trains = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        return checkpoint.states(batch)

    @abstractmethod
    def compared(self, states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """What is compared [b n d] of final states [b t d] at real positions [b t], and how many they are [b]."""

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        side = batch.source if batch.target is None else batch.target
        states, counts = self.compared(precise(output), side.real)
        directions = torch.nn.functional.normalize(states.detach(), dim=-1) if aim is None else aim
        return ObjectiveOutput((states * directions).sum(dim=(1, 2)), counts, directions, states=states)

    def damage(self, intact: ObjectiveOutput, altered: ObjectiveOutput) -> Tensor:
        """The sum over a sentence of `distance` [b]."""
        assert intact.states is not None and altered.states is not None
        return self.distance(intact.states, altered.states, intact.counts)

    @abstractmethod
    def distance(self, intact: Tensor, altered: Tensor, counts: Tensor) -> Tensor:
        """How far states [b n d] are from those of the intact model, of which `counts` [b] are real: [b]."""


def every_token(states: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The states of all real tokens, and how many they are."""
    return states * real[..., None], real.sum(dim=-1)
