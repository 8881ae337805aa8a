"""The logit of a model's own predictions."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.base import (
    Objective,
    ObjectiveOutput,
    no_words,
    objective,
    per_sentence,
    predicting,
)
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise


@objective
class Top1(Objective):
    """Σ over positions of the largest logit; counts are positions. For a classifier the logit of its class.

    A decoder predicts at every real position, teacher-forced; an encoder at every token that is not special,
    with nothing hidden, and so does a model that tags words. `aim` [b t] (or [b]) holds the predicted ids: an altered
    model's value is the logits of what the intact model predicts.
    """

    name = "top1"
    summary = "logit of what the model says: the likeliest token of each position, or the class"
    damage_words = "logit of its prediction falls by"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return None if checkpoint.label_names else no_words(checkpoint, has_target=has_target)

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        return checkpoint.class_scores(batch) if checkpoint.predicts == "classes" else checkpoint.logits(batch)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        if aim is None:
            aim = output.detach().argmax(dim=-1)  # [b t] or [b]
        if output.ndim == 2:
            values = precise(output).gather(1, aim[:, None])[:, 0]
            return ObjectiveOutput(values, torch.ones_like(values), aim)
        _, counted = predicting(batch, decodes=checkpoint.decodes)
        rows, positions = counted.nonzero(as_tuple=True)
        values = precise(output[rows, positions, aim[rows, positions]])
        return ObjectiveOutput(per_sentence(values, rows, len(counted)), counted.sum(dim=1), aim)
