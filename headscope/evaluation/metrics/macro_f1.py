"""Macro-F1 of a classifier: the mean over labels of the F1 of each, however rare it is."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.metrics.accuracy import most_frequent, why_unlabelled
from headscope.evaluation.metrics.base import Floor, Metric, SentenceScores, ValidationText, group_columns, metric
from headscope.evaluation.metrics.perplexity import whole_likelihood
from headscope.formats.base import Checkpoint


@metric
class MacroF1(Metric):
    """Mean of 2 right / (predicted + wanted) over the labels that are predicted or wanted at least once.

    That is scikit-learn's `f1_score(average="macro")` without `labels`. Of token classifiers it is over words, not
    over spans as CoNLL's own F1 is. Sums are [label 3]: how often each was right, predicted and wanted.
    """

    name = "macro-f1"
    title = "macro-F1"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        return why_unlabelled(checkpoint, has_labels=has_labels)

    def of(self, sums: Array) -> Array:
        return macro_f1(sums.reshape(len(sums), -1, 3))

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        share, labels = most_frequent(data)
        return Floor(2 * share / (1 + share) / labels, "what the most frequent label alone reaches")

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        scored = whole_likelihood(checkpoint, data)
        counts = scored.classes.total[: scored.classes.used, 0].flatten(1)
        return SentenceScores(counts.numpy(), group_columns(scored.nll))


def macro_f1(counts: Array) -> Array:
    """Macro-F1 [n] of counts [n label 3]; NaN where nothing was labelled."""
    right, predicted, wanted = np.moveaxis(counts, -1, 0)
    some = predicted + wanted > 0
    with np.errstate(invalid="ignore"):
        f1 = np.where(some, 2 * right / np.where(some, predicted + wanted, 1), 0.0)
        values: Array = f1.sum(axis=-1) / some.sum(axis=-1)
        return values
