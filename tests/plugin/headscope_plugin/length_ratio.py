"""A metric: how long translations are, in words, beside their references."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.metrics.base import TranslationMetric, Translations, add_groups, metric


@metric
class LengthRatio(TranslationMetric):
    """Words of all translations over words of all references."""

    name = "length-ratio"
    title = "length ratio"

    def sums(self, read: Translations) -> Array:
        pairs = zip(read.hypotheses, read.references, strict=True)
        lengths = [(len(hypothesis.split()), len(reference.split())) for hypothesis, reference in pairs]
        return add_groups(np.array(lengths, dtype=float))[:, None]
