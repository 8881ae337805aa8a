"""The contract of a metric, and the registry that finds it by name.

A metric is a function of sums over the corpus: BLEU of matches, n-grams and lengths, perplexity of Σ -log p and
tokens, accuracy of hits and sentences. Sums are kept for groups of sentences, as `headscope.bootstrap` does, so
intervals and paired tests (`headscope.evaluation.comparison`) need no second pass over the text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from headscope.bootstrap import GROUPS, Array, GroupSums
from headscope.data.corpus import Corpus
from headscope.errors import ConfigError
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.registry import Registry


@dataclass(frozen=True)
class ValidationText:
    """A corpus (with labels where the model is measured by them), and how it is read and translated.

    `text` says what BLEU compares: "raw" or "tokenised-lowercase". `intact` is the model that states are compared with.
    """

    corpus: Corpus
    reading: LikelihoodOptions
    options: TranslateOptions
    text: str
    intact: Checkpoint | None = None


@dataclass(frozen=True)
class SentenceScores:
    """The sums that a metric is made of [g c], and Σ loss and counts [g 2], by group of sentences."""

    sums: Array
    loss: Array


@dataclass(frozen=True)
class Floor:
    """What a model reaches that has learnt nothing, and what that number is."""

    value: float
    words: str


class Metric(ABC):
    """A number `of` sums, how to `score` a model, and the `floor` at which losses mean nothing.

    A file in this folder defines one final subclass and registers it.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    higher_is_better: ClassVar[bool] = True

    @classmethod
    @abstractmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        """Why the metric does not apply to a checkpoint on such a text, None where it does."""

    @abstractmethod
    def of(self, sums: Array) -> Array:
        """The metric of sums [n c]: [n]."""

    @abstractmethod
    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        """The sums of a model, as its masks and gates are now, on a text."""

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor | None:
        """What a model that has learnt nothing reaches; None where every model is a baseline."""
        return None

    def worse(self, values: Array, reference: Array) -> Array:
        """How much worse values are than a reference; below 0 they are better."""
        with np.errstate(invalid="ignore"):
            losses: Array = reference - values if self.higher_is_better else values - reference
        return losses


METRICS: Registry[Metric] = Registry(
    "metric", package="headscope.evaluation.metrics", group="headscope.evaluation.metrics"
)


def metric(cls: type[Metric]) -> type[Metric]:
    """Register a metric under its `name`."""
    METRICS.register(cls.name, cls(), where=cls.__module__)
    return cls


DEFAULTS = {
    "words": ("bleu", "perplexity"),
    "classes": ("accuracy",),
    "tags": ("accuracy",),
    "nothing": ("cosine",),
}
"""The metric of a model by what it predicts: the first that applies."""


def choose_metric(name: str, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str:
    """The metric's name, or where `name` is empty the default one of the model: BLEU of what translates, perplexity of
    other models that predict words, accuracy of classifiers, the cosine to the intact model of encoders without a head.

    ConfigError for an unknown name, and where it does not apply.
    """
    given = {"has_target": has_target, "has_labels": has_labels}
    wanted = [name] if name else DEFAULTS[checkpoint.predicts]
    why = {option: METRICS.get(option).applies(checkpoint, **given) for option in wanted}
    fitting = [option for option, reason in why.items() if reason is None]
    if not fitting:
        last = f"--metric {name}: {why[name]}" if name else why[wanted[-1]]
        raise ConfigError(f"a model of type {checkpoint.model_type!r}: {last}")
    return fitting[0]


def ratio_of(sums: Array) -> Array:
    """Σ values / Σ counts of sums [n 2]: [n]."""
    ratios: Array = sums[:, 0] / sums[:, 1]
    return ratios


def grouped(rows: Array) -> Array:
    """Rows of sentences [n c] summed by group: sentence i is in group i mod 1024."""
    sums = np.zeros((min(len(rows), GROUPS), rows.shape[1]))
    np.add.at(sums, np.arange(len(rows)) % GROUPS, rows)
    return sums


def group_columns(sums: GroupSums) -> Array:
    """Totals and counts of the first mask by group of sentences [g 2]."""
    totals, counts = (part[: sums.used].reshape(sums.used, -1)[:, :1] for part in (sums.total, sums.count))
    both: Array = torch.cat([totals, counts], dim=1).numpy()
    return both
