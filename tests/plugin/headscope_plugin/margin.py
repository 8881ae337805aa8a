"""An objective: how far the likeliest token is ahead of the next one."""

from __future__ import annotations

from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, no_words, objective, predicting
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise


@objective
class Margin(Objective):
    """Σ over positions of the difference between the two largest logits; counts are positions.

    `aim` [b t 2] holds the two tokens of the intact model: an altered model is asked about the same ones.
    """

    name = "margin"
    summary = "logits by which the likeliest token of each position is ahead of the next one"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return no_words(checkpoint, has_target=has_target)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        if aim is None:
            aim = output.detach().topk(2, dim=-1).indices  # [b t 2]
        _, predicts = predicting(batch, decodes=checkpoint.decodes)  # [b t]
        first, second = precise(output.gather(-1, aim)).unbind(dim=-1)
        values = (first - second).masked_fill(~predicts, 0).sum(dim=1)  # [b]
        return ObjectiveOutput(values, predicts.sum(dim=1), aim)
