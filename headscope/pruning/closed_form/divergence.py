"""How far a model's predictions of words are from the intact model's: less noisy on few lines than their loss is."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import log_softmax

from headscope.attribution.objectives.base import ObjectiveOutput, per_sentence
from headscope.attribution.objectives.predictions import LossObjective
from headscope.data.encoded import IGNORED, Batch
from headscope.evaluation.likelihood import CELLS
from headscope.formats.base import Checkpoint
from headscope.model.attention import precise

WORDS = 1000
"""Words that are told apart at a position, those that the intact model finds likeliest; all others count as one."""


class Divergence(LossObjective):
    """Σ KL(p ‖ q) in nats, of the intact model's predictions p and an altered model's q, where words are predicted.

    A mean of differences of losses is as exact with many times the text: where a word was unlikely anyway, how much so
    is mostly chance. `aim` [n 2 w] are log p of `WORDS` words of n predictions and the ids of these words (floats).
    """

    name = "divergence"
    summary = "KL divergence from the intact model's predictions"
    damage_words = "nats from the intact predictions"

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        assert batch.labels is not None, "the batch was read without labels"
        places = (batch.labels != IGNORED).nonzero()
        step = max(1, CELLS // output.shape[-1])
        aims, divergences = list[Tensor](), list[Tensor]()
        for number, part in enumerate(places.split(step)):
            log_q = log_softmax(precise(output[part.unbind(dim=1)]), dim=-1)  # [n v]
            top = _likeliest(log_q) if aim is None else aim.split(step)[number]
            log_p, ids = top[:, 0], top[:, 1].long()  # [n w]
            divergences.append(_divergence(log_p, log_q.gather(1, ids)))
            aims.append(top)
        values = per_sentence(torch.cat(divergences), places[:, 0], len(batch.labels))
        return ObjectiveOutput(values, (batch.labels != IGNORED).sum(dim=1), torch.cat(aims) if aim is None else aim)


def _likeliest(log_p: Tensor) -> Tensor:
    values, ids = log_p.topk(min(WORDS, log_p.shape[-1]), dim=-1)
    return torch.stack((values, ids.to(values)), dim=1)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL [n] of distributions whose likeliest words have `log_p` and `log_q` [n w]; the others are one more."""
    p, q = log_p.exp(), log_q.exp()
    smallest = torch.finfo(p.dtype).eps
    p_others, q_others = ((1 - share.sum(dim=-1)).clamp(min=smallest) for share in (p, q))
    gaps = (log_p - log_q).masked_fill(p == 0, 0.0)  # words that a model never says
    return (p * gaps).sum(dim=-1) + p_others * (p_others / q_others).log()
