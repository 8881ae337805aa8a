"""Logits: of a model's own predictions, and of the answer to a prompt beside a wrong one."""

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
from headscope.data.encoded import IGNORED, Batch
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise


@objective
class AnswerObjective(Objective):
    """logit(answer) − logit(wrong answer) at the position where a prompt asks for it (Wang et al. 2022).

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
        """The logits [b V] at the positions of the answers."""
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
        has_no_wrong = contrasts.wrong == IGNORED
        wrong = logits[rows, contrasts.wrong.masked_fill(has_no_wrong, 0)]
        values = right - torch.where(has_no_wrong, logits.logsumexp(dim=-1), wrong)
        return ObjectiveOutput(values, torch.ones_like(values))


@objective
class Top1(Objective):
    """Σ over positions of the largest logit; counts are positions. For a classifier the logit of its class.

    A decoder predicts at every real position, teacher-forced; an encoder and a token classifier at every token
    that is not special, none of them masked. `aim` [b t] (or [b]) holds the predicted ids: an altered
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
        _, is_prediction = predicting(batch, decodes=checkpoint.decodes)
        rows, positions = is_prediction.nonzero(as_tuple=True)
        values = precise(output[rows, positions, aim[rows, positions]])
        return ObjectiveOutput(per_sentence(values, rows, len(is_prediction)), is_prediction.sum(dim=1), aim)
