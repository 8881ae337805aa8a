"""Measure the damage of altered copies of a model by an objective, on a text that is held in memory."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

from headscope.attribution.objectives.base import OBJECTIVES, Objective, ObjectiveOutput, choose_objective, per_sentence
from headscope.attribution.objectives.predictions import LossObjective
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, check_predictions
from headscope.data.encoded import IGNORED, Batch
from headscope.evaluation.likelihood import CELLS
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.model.attention import precise
from headscope.model.discovery import eval_mode, find_attention
from headscope.model.fast_products import FastProducts
from headscope.model.prefix_cache import SharedLayers
from headscope.model.streaming import streaming
from headscope.pruning.closed_form.moments import text_batches

MAX_SENTENCES = 128
"""Sentences that are enough to compare modules on."""


@dataclass(frozen=True)
class Performance:
    """The objective of a model on a text, a mean over `predictions`; `damage` is 0 for the intact model.

    `value` is the loss in nats a token, the cosine to the intact model's vectors, or a logit.
    """

    objective: str
    value: float
    damage: float
    sentences: int
    predictions: float


class DamageMeter:
    """The batches of a text with the intact model's outcomes, to compare altered models with.

    `objective` "" is the default one of model and text. `fast` meters, which rank many models, compute with
    `FastProducts`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        corpus: Corpus,
        *,
        batching: BatchingOptions | None = None,
        objective: str | Objective = "",
        seed: int = 1,
        fast: bool = False,
    ) -> None:
        text = text_batches(checkpoint, corpus, batching, labels=True)
        if isinstance(objective, str):
            objective = OBJECTIVES.get(choose_objective(objective, checkpoint, **corpus.comes_with))(seed=seed)
        self.checkpoint, self.objective, self.corpus = checkpoint, objective, corpus
        self.products = FastProducts if fast else nullcontext
        self.intact, self.predictions = list[tuple[Batch, ObjectiveOutput]](), 0.0
        with eval_mode(checkpoint.model), streaming(), torch.no_grad(), self.products():
            for batch in text:
                on_device = batch.to(checkpoint.device)
                self.intact.append((on_device, objective.outcome(checkpoint, on_device)))
                self.predictions += float(self.intact[-1][1].counts.sum())
        check_predictions(self.predictions, corpus.name)

    @property
    def of_intact(self) -> Performance:
        """The performance of the intact model."""
        total = sum(float(outcome.values.double().sum()) for _, outcome in self.intact)
        return self._performance(total, 0.0)

    def measure(
        self,
        model: nn.Module | None = None,
        *,
        layers: SharedLayers | None = None,
        site_layers: Collection[SiteLayer] = (),
    ) -> Performance:
        """The performance of an altered `model` (None: the checkpoint's, as it is now).

        `layers` caches the layers of a model that differs from this one only in `site_layers`.
        """
        changed_copy = self.checkpoint if model is None else self.checkpoint.with_model(model)
        total = damage = 0.0
        find_attention(changed_copy.model)  # of a new copy it runs a probe, which is no text and must be exact
        with eval_mode(changed_copy.model), streaming(), torch.no_grad(), self.products():
            for number, (batch, intact) in enumerate(self.intact):
                shared = nullcontext() if layers is None else layers.passing(number, site_layers)
                with shared:
                    outcome = self.objective.outcome(changed_copy, batch, intact.aim)
                total += float(outcome.values.double().sum())
                damage += float(self.objective.damage(intact, outcome).double().sum())
        return self._performance(total, damage)

    def _performance(self, total: float, damage: float) -> Performance:
        share = damage / self.predictions
        values = {"value": total / self.predictions, "distance": share, "similarity": 1 - share}
        value, sentences = values[self.objective.reports], self.corpus.count
        return Performance(self.objective.name, value, share, sentences, self.predictions)


WORDS = 1000
"""The intact model's likeliest words of a position, which are compared; all others count as one word."""


class Divergence(LossObjective):
    """Σ KL(p ‖ q) in nats, of the intact model's predictions p and an altered model's q, where words are predicted.

    A difference of losses needs many times the text to be as exact, because the loss of unlikely words is mostly
    chance. `aim` [n 2 w] has log p of the `WORDS` likeliest words of n predictions, and their ids (as floats).
    """

    name = "divergence"
    summary = "KL divergence from the intact model's predictions"
    damage_words = "nats from the intact predictions"

    def evaluate(
        self, checkpoint: Checkpoint, output: Tensor, batch: Batch, aim: Tensor | None = None
    ) -> ObjectiveOutput:
        assert batch.labels is not None, "the batch was read without labels"
        positions = (batch.labels != IGNORED).nonzero()
        step = max(1, CELLS // output.shape[-1])
        aims, divergences = list[Tensor](), list[Tensor]()
        for number, part in enumerate(positions.split(step)):
            log_q = log_softmax(precise(output[part.unbind(dim=1)]), dim=-1)  # [n v]
            if aim is None:
                log_p, ids = log_q.topk(min(WORDS, log_q.shape[-1]), dim=-1)  # [n w]
                aims.append(torch.stack((log_p, ids.to(log_p)), dim=1))
            else:
                log_p, ids = aim.split(step)[number].unbind(dim=1)
            divergences.append(divergence(log_p, log_q.gather(1, ids.long())))
        values = per_sentence(torch.cat(divergences), positions[:, 0], len(batch.labels))
        return ObjectiveOutput(values, (batch.labels != IGNORED).sum(dim=1), torch.cat(aims) if aim is None else aim)


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL [n] of distributions whose likeliest words have `log_p` and `log_q` [n w]; all other words count as one."""
    p, q = log_p.exp(), log_q.exp()
    smallest = torch.finfo(p.dtype).eps
    p_others, q_others = ((1 - share.sum(dim=-1)).clamp(min=smallest) for share in (p, q))
    log_ratio = (log_p - log_q).masked_fill(p == 0, 0.0)  # 0 · log 0 is 0
    return (p * log_ratio).sum(dim=-1) + p_others * (p_others / q_others).log()
