"""How much worse than the intact model altered copies of it are, by the objective, on a text that is held in memory.

Many copies are compared in two stages: all of them on a few lines, spread over the text, the best ones on all. What was
measured on the few lines counts when the rest is measured, so that no line is read twice by a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress

import torch
from torch import nn

from headscope.attribution.objectives.base import OBJECTIVES, Objective, ObjectiveOutput, choose_objective
from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus, check_predictions
from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.model.threads import threads_for_pass
from headscope.pruning.closed_form.moments import text_batches

FEW, SHARE = 12, 4
"""Lines that the first stage has at least; it has one line of so many."""


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

        ConfigError for an objective that does not apply, and for a target that the model cannot read; DataError for a
        text of which nothing is predicted.
        """
        stream = text_batches(checkpoint, corpus, batching, labels=True)
        name = choose_objective(objective, checkpoint, **corpus.comes_with)
        meter = cls(checkpoint, OBJECTIVES.get(name)(seed=seed), corpus.count)
        with eval_mode(checkpoint.model), torch.no_grad():
            for batch in stream:
                on_device = batch.to(checkpoint.device)
                with threads_for_pass(checkpoint.model, batch.positions):
                    meter.intact.append((on_device, meter.objective.outcome(checkpoint, on_device)))
        check_predictions(sum(float(outcome.counts.sum()) for _, outcome in meter.intact), corpus.name)
        return meter

    @property
    def of_intact(self) -> Performance:
        """The performance of the intact model."""
        total, predictions = (
            sum(float(tensor.double().sum()) for tensor in tensors)
            for tensors in zip(*((each.values, each.counts) for _, each in self.intact), strict=True)
        )
        value = self.objective.performance(total / predictions, 0.0)
        return Performance(self.objective.name, value, 0.0, self.sentences, predictions)

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


@dataclass(frozen=True)
class StagedMeter:
    """The damage on `few` lines of a text, and on all of them; `rest` is None where the few are all."""

    few: DamageMeter
    rest: DamageMeter | None

    @classmethod
    def of(cls, corpus: Corpus, meter: Callable[[Corpus], DamageMeter]) -> StagedMeter:
        """Divide a corpus; `meter` runs the intact model over a part."""
        count = max(FEW, -(-corpus.count // SHARE))
        if count >= corpus.count:
            return cls(meter(corpus), None)
        first = spread(corpus.count, count)
        return cls(meter(lines(corpus, first)), meter(lines(corpus, [not chosen for chosen in first])))

    @property
    def of_intact(self) -> Performance:
        """The performance of the intact model."""
        return self.few.of_intact if self.rest is None else joined(self.few.of_intact, self.rest.of_intact)

    def measure(self, model: nn.Module | None = None, *, few: Performance | None = None) -> Performance:
        """The performance on all lines; `few` is that of the first stage, where it is known."""
        few = few or self.few.measure(model)
        return few if self.rest is None else joined(few, self.rest.measure(model))


def joined(one: Performance, other: Performance) -> Performance:
    """The performance on two parts of a text together."""
    predictions = one.predictions + other.predictions

    def mean(first: float, second: float) -> float:
        return (first * one.predictions + second * other.predictions) / predictions

    value, damage = mean(one.value, other.value), mean(one.damage, other.damage)
    return Performance(one.objective, value, damage, one.sentences + other.sentences, predictions)


def spread(count: int, chosen: int) -> list[bool]:
    """Which of `count` lines are `chosen` ones, as far apart as can be."""
    return [(line + 1) * chosen // count > line * chosen // count for line in range(count)]


def lines(corpus: Corpus, chosen: Sequence[bool]) -> Corpus:
    """The lines of a corpus that are chosen."""
    return replace(corpus, count=sum(chosen), read=lambda: compress(corpus, chosen))
