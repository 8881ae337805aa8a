"""Macro-F1 of a classifier: the mean over labels of the F1 of each, however rare it is."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.likelihood import Likelihood
from headscope.evaluation.metrics.accuracy import label_counts
from headscope.evaluation.metrics.base import Floor, LikelihoodMetric, ValidationText, metric
from headscope.formats.base import Checkpoint


@metric
class MacroF1(LikelihoodMetric):
    """Mean of 2 right / (predicted + wanted) over the labels that are predicted or wanted at least once.

    That is scikit-learn's `f1_score(average="macro")` without `labels`. Of token classifiers it is over words, not
    over spans as CoNLL's own F1 is. Sums are [label 3]: how often each was right, predicted and wanted.
    """

    name = "macro-f1"
    title = "macro-F1"
    order = 60
    words = False

    def sums(self, read: Likelihood) -> Array:
        counts: Array = read.classes.total[: read.classes.used].flatten(2).numpy()
        return counts

    def of(self, sums: Array) -> Array:
        return macro_f1(sums.reshape(len(sums), -1, 3))

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        counts = label_counts(checkpoint, data)
        share = max(counts.values()) / counts.total()
        return Floor(2 * share / (1 + share) / len(counts), "what the most frequent label alone reaches")


def macro_f1(counts: Array) -> Array:
    """Macro-F1 [n] of counts [n label 3]; NaN where nothing was labelled."""
    right, predicted, wanted = np.moveaxis(counts, -1, 0)
    some = predicted + wanted > 0
    with np.errstate(invalid="ignore"):
        f1 = np.where(some, 2 * right / np.where(some, predicted + wanted, 1), 0.0)
        values: Array = f1.sum(axis=-1) / some.sum(axis=-1)
        return values
