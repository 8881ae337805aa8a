"""chrF of translations (Popović 2015), as sacreBLEU counts it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.metrics.base import (
    Floor,
    TextMode,
    TranslationMetric,
    Translations,
    ValidationText,
    grouped,
    metric,
    reference_texts,
)
from headscope.formats.base import Checkpoint

if TYPE_CHECKING:
    from sacrebleu.metrics.chrf import CHRF


@metric
class Chrf(TranslationMetric):
    """sacreBLEU's corpus chrF2 of n-grams of translations, of references, and of both, for each length of n-grams."""

    name = "chrf"
    title = "chrF2"
    order = 20

    def sums(self, read: Translations) -> Array:
        rows = sacrebleus(raw=read.raw)._extract_corpus_statistics(read.hypotheses, [read.references])
        return grouped(np.array(rows, dtype=np.float64))[:, None]

    def of(self, sums: Array) -> Array:
        chrf = sacrebleus()
        return np.array([chrf._compute_score_from_stats(row).score for row in sums.tolist()])

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        texts = reference_texts(checkpoint, data.corpus)
        others = self.sums(Translations([*texts[1:], *texts[:1]], texts, data.text)).sum(axis=0)
        return Floor(float(self.of(others)[0]), "what the translation of the next sentence reaches")

    def signature(self, text: TextMode) -> str:
        chrf = sacrebleus(raw=text == "raw")
        chrf.corpus_score([""], [[""]])  # says how many references there are
        return str(chrf.get_signature())


def sacrebleus(*, raw: bool = True) -> CHRF:
    """sacreBLEU's chrF; without `raw` whatever the case."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=not raw)
