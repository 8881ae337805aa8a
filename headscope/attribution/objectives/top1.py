"""The score of what a model says."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, objective
from headscope.attribution.objectives.predictions import no_words, per_sentence, precise, predicting
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint


@objective
class Top1(Objective):
    """Σ over positions of the largest logit; counts are positions. For a classifier the logit of its class.

    A decoder predicts at every real position, teacher-forced; an encoder in place of every token that is no
    special one, with nothing hidden. `aim` [b t] (or [b]) holds the ids: an altered model is asked for the
    logits of what the intact one says.
    """

    name = "top1"
    summary = "logit of what the model says: the likeliest token of each position, or the class"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        return None if checkpoint.predicts == "classes" else no_words(checkpoint, has_target=has_target)

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
        rows, places = counted.nonzero(as_tuple=True)
        values = precise(output[rows, places, aim[rows, places]])
        return ObjectiveOutput(per_sentence(values, rows, len(counted)), counted.sum(dim=1), aim)
