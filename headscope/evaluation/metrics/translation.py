"""BLEU (Papineni et al. 2002) and chrF (Popović 2015) of translations, as sacreBLEU counts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.metrics.base import (
    Floor,
    TranslationMetric,
    Translations,
    ValidationText,
    add_groups,
    metric,
    reference_texts,
)
from headscope.evaluation.translation import TextMode
from headscope.formats.base import Checkpoint

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

ORDERS = 4  # of n-grams


@metric
class Bleu(TranslationMetric):
    """BLEU of the whole text by sacreBLEU, from matches [4], n-grams [4], and both lengths."""

    name = "bleu"
    worst = 0.0
    title = "BLEU"
    order = 10

    def sums(self, read: Translations) -> Array:
        bleu, rows = sacrebleu_bleu(read.text), []
        for hypothesis, reference in zip(read.hypotheses, read.references, strict=True):
            score = bleu.corpus_score([hypothesis], [[reference]])
            rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
        return add_groups(np.array(rows, dtype=np.float64))[:, None]

    def of(self, sums: Array) -> Array:
        from sacrebleu.metrics.bleu import BLEU

        def corpus_bleu(row: Sequence[float]) -> float:
            counts = [int(count) for count in row]
            matches, totals = counts[:ORDERS], counts[ORDERS : 2 * ORDERS]
            score = BLEU.compute_bleu(matches, totals, counts[-2], counts[-1], smooth_method=BLEU().smooth_method)
            return float(score.score)

        return np.array([corpus_bleu(row) for row in sums.tolist()])

    def worst_sums(self, sums: Array) -> Array:
        return np.hstack([np.zeros_like(sums[:, :ORDERS]), sums[:, ORDERS:]])

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(1.0, "near zero")

    def signature(self, text: TextMode) -> str:
        bleu = sacrebleu_bleu(text)
        bleu.corpus_score([""], [[""]])  # says how many references there are
        return str(bleu.get_signature())


def sacrebleu_bleu(text: TextMode) -> BLEU:
    """sacreBLEU's BLEU, with its tokenisation of raw text."""
    from sacrebleu.metrics.bleu import BLEU

    return BLEU(tokenize=text.tokenize, lowercase=not text.raw, force=True)


@metric
class Chrf(TranslationMetric):
    """sacreBLEU's corpus chrF2 of n-grams of translations, of references, and of both, for each length of n-grams."""

    name = "chrf"
    worst = 0.0
    title = "chrF2"
    order = 20

    def sums(self, read: Translations) -> Array:
        rows = sacrebleu_chrf(raw=read.text.raw)._extract_corpus_statistics(read.hypotheses, [read.references])
        return add_groups(np.array(rows, dtype=np.float64))[:, None]

    def of(self, sums: Array) -> Array:
        chrf = sacrebleu_chrf()
        return np.array([chrf._compute_score_from_stats(row).score for row in sums.tolist()])

    def worst_sums(self, sums: Array) -> Array:
        return sums * np.tile([1.0, 1.0, 0.0], sums.shape[1] // 3)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        texts = reference_texts(checkpoint, data.corpus)
        floor_sums = self.sums(Translations([*texts[1:], *texts[:1]], texts, data.text)).sum(axis=0)
        return Floor(float(self.of(floor_sums)[0]), "what the translation of the next sentence reaches")

    def signature(self, text: TextMode) -> str:
        chrf = sacrebleu_chrf(raw=text.raw)
        chrf.corpus_score([""], [[""]])  # says how many references there are
        return str(chrf.get_signature())


def sacrebleu_chrf(*, raw: bool = True) -> CHRF:
    """sacreBLEU's chrF; without `raw` whatever the case."""
    from sacrebleu.metrics.chrf import CHRF

    return CHRF(lowercase=not raw)
