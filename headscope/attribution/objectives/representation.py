"""The sentence vector of an encoder: its mean-pooled final state."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, objective
from headscope.attribution.objectives.predictions import precise
from headscope.data.encoded import Batch
from headscope.evaluation.states import mean_pooled
from headscope.formats.base import Checkpoint


@objective
class Representation(Objective):
    """The mean-pooled final state of a sentence, for models that predict nothing.

    The mean is over all real positions, special ones too, as sentence encoders pool. The value is the
    projection of the mean on its own direction, which is held constant: its gradient is that of the norm. The
    damage is the cosine distance to the intact vector, 1 − cos, in [0, 2]; with the intact direction as `aim`
    [b d] an altered model's value is the projection of its mean on that. The last stack that runs is read: the
    decoder where there is one and a target, else the encoder.
    """

    name = "representation"
    summary = "mean-pooled final state: its length along its own direction, cosine distance for ablations"
    trains = True
    compares = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        return checkpoint.states(batch)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        side = batch.source if batch.target is None else batch.target
        mean = mean_pooled(precise(output), side.real)
        direction = torch.nn.functional.normalize(mean.detach(), dim=-1) if aim is None else aim
        values = (mean * direction).sum(dim=-1)
        return ObjectiveOutput(values, torch.ones_like(values), direction, mean)

    def damage(self, intact: ObjectiveOutput, altered: ObjectiveOutput) -> Tensor:
        """1 − cos of the two vectors [b]."""
        assert intact.vector is not None and altered.vector is not None
        return 1 - torch.nn.functional.cosine_similarity(intact.vector, altered.vector, dim=-1)

    def performance(self, value: float, damage: float) -> float:
        """The cosine to the intact model."""
        return 1 - damage
