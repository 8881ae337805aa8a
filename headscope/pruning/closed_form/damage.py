"""How much worse than the intact model altered copies of it are, by the objective, on a text that is held in memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from headscope.attribution.objectives.base import OBJECTIVES, Objective, ObjectiveOutput, choose_objective
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.model.threads import threads_for_pass
from headscope.pruning.closed_form.moments import text_batches


@dataclass(frozen=True)
class Performance:
    """The objective of a model on a text, a mean over `predictions`; `damage` is 0 for the intact model.

    `value` is the objective as it is called: the loss in nats a token, the cosine to the intact model's sentence
    vectors for objectives that compare vectors, a logit for others.
    """

    objective: str
    value: float
    damage: float
    sentences: int
    predictions: float


@dataclass
class DamageMeter:
    """The batches of a text and what the intact model makes of them, to compare altered models with."""

    checkpoint: Checkpoint
    objective: Objective
    sentences: int
    intact: list[tuple[Batch, ObjectiveOutput]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        corpus: Corpus,
        *,
        batching: BatchingOptions | None = None,
        objective: str = "",
        seed: int = 1,
    ) -> DamageMeter:
        """Run the intact model once over a corpus; `objective` "" is the default one of model and text.

        ConfigError for an objective that does not apply, and for a target that the model cannot read.
        """
        stream = text_batches(checkpoint, corpus, batching, labels=True)
        given = {"has_target": corpus.has_target, "has_labels": corpus.has_labels}
        name = choose_objective(objective, checkpoint, **given)
        meter = cls(checkpoint, OBJECTIVES.get(name)(seed=seed), corpus.count)
        with eval_mode(checkpoint.model), torch.no_grad():
            for batch in stream:
                on_device = batch.to(checkpoint.device)
                with threads_for_pass(checkpoint.model, batch.positions):
                    meter.intact.append((on_device, meter.objective.outcome(checkpoint, on_device)))
        return meter

    def measure(self, model: nn.Module | None = None) -> Performance:
        """The performance of an altered copy of the model; of the model as it now is where there is none."""
        altered = self.checkpoint if model is None else self.checkpoint.with_model(model)
        total = damage = predictions = 0.0
        with eval_mode(altered.model), torch.no_grad():
            for batch, intact in self.intact:
                with threads_for_pass(altered.model, batch.positions):
                    outcome = self.objective.outcome(altered, batch, intact.aim)
                total += float(outcome.values.double().sum())
                damage += float(self.objective.damage(intact, outcome).double().sum())
                predictions += float(intact.counts.sum())
        share = damage / predictions
        value = self.objective.performance(total / predictions, share)
        return Performance(self.objective.name, value, share, self.sentences, predictions)
