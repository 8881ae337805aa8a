"""The answer to a prompt: how much likelier the model holds it than a wrong one."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput, objective
from headscope.data.encoded import IGNORED, Batch
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise


@objective
class AnswerObjective(Objective):
    """logit(answer) − logit(wrong answer) at the place where a prompt asks for it (Wang et al. 2022).

    Where a prompt has no wrong answer: log p(answer), in nats. A mean over it is over prompts.
    """

    name = "answer"
    summary = "logit of the answer to a prompt, less that of the wrong answer"
    damage_words = "logit of the answer falls by"
    needs_prompts = True

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.predicts in ("words", "classes"):
            return None
        return "needs a model that predicts words or classes"

    def output(self, checkpoint: Checkpoint, batch: Batch) -> Tensor:
        """The logits [b V] at the places that are asked for."""
        assert batch.contrasts is not None, "the sentences are no prompts"
        if checkpoint.predicts == "classes":
            return checkpoint.class_scores(batch)
        return checkpoint.logits_at(batch, batch.contrasts.positions)

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        contrasts = batch.contrasts
        assert contrasts is not None, "the sentences are no prompts"
        logits, rows = precise(output), torch.arange(len(output), device=output.device)
        right = logits[rows, contrasts.answers]
        without = contrasts.wrong == IGNORED
        wrong = logits[rows, contrasts.wrong.masked_fill(without, 0)]
        values = right - torch.where(without, logits.logsumexp(dim=-1), wrong)
        return ObjectiveOutput(values, torch.ones_like(values))
