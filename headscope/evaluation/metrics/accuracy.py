"""Accuracy of a classifier: the share of sentences, or of tagged words, that get the right label."""

from __future__ import annotations

from collections import Counter

from headscope.bootstrap import Array
from headscope.evaluation.labels import no_labels
from headscope.evaluation.metrics.base import (
    Floor,
    Metric,
    SentenceScores,
    ValidationText,
    group_columns,
    metric,
    ratio_of,
)
from headscope.evaluation.metrics.perplexity import whole_likelihood
from headscope.formats.base import Checkpoint


@metric
class Accuracy(Metric):
    """Hits over labels."""

    name = "accuracy"
    title = "accuracy"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return why_unlabelled(checkpoint, has_labels=has_labels)

    def of(self, sums: Array) -> Array:
        return ratio_of(sums)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(most_frequent(data)[0], "the share of the most frequent label")

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        scored = whole_likelihood(checkpoint, data)
        return SentenceScores(group_columns(scored.right), group_columns(scored.nll))


def most_frequent(data: ValidationText) -> tuple[float, int]:
    """The share of the most frequent of the right labels, and how many labels there are among them."""
    counts = Counter(label for sentence in data.corpus for label in (sentence.labels.ids if sentence.labels else ()))
    return max(counts.values()) / counts.total(), len(counts)


def why_unlabelled(checkpoint: Checkpoint, *, has_labels: bool) -> str | None:
    """Why a checkpoint has no labels to be right about, None where it has."""
    if why := no_labels(checkpoint):
        return f"needs a classifier, and {why}"
    return None if has_labels else "needs --labels FILE (or --valid-labels), the right class of every line"
