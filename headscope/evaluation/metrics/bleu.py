"""BLEU of translations (Papineni et al. 2002), as sacreBLEU counts it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.metrics.base import Floor, Metric, SentenceScores, ValidationText, grouped, metric
from headscope.evaluation.metrics.perplexity import token_loss
from headscope.evaluation.translation import translate_lines
from headscope.formats.base import Checkpoint

ORDERS = 4  # of n-grams


@metric
class Bleu(Metric):
    """sacreBLEU's corpus BLEU of matches [4], n-grams [4], and the lengths of translations and references."""

    name = "bleu"
    title = "BLEU"

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if not checkpoint.needs_target:
            return "needs a model that translates"
        return None if has_target else "needs --target and --valid-target, the translations"

    def of(self, sums: Array) -> Array:
        from sacrebleu.metrics.bleu import BLEU

        def corpus_bleu(row: Sequence[float]) -> float:
            counts = [int(count) for count in row]
            matches, totals = counts[:ORDERS], counts[ORDERS : 2 * ORDERS]
            score = BLEU.compute_bleu(matches, totals, counts[-2], counts[-1], smooth_method=BLEU().smooth_method)
            return float(score.score)

        return np.array([corpus_bleu(row) for row in sums.tolist()])

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(1.0, "near zero")

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        loss = token_loss(checkpoint, data)
        lines = (sentence.source for sentence in data.corpus)
        translations = translate_lines(checkpoint, lines, options=data.options, tokens=data.reading.tokens)
        hypotheses = [best[0].text for best in translations]
        references = [checkpoint.joined(sentence.target or "") for sentence in data.corpus]
        return SentenceScores(bleu_sums(hypotheses, references, raw=data.text == "raw"), loss)


def bleu_sums(hypotheses: Sequence[str], references: Sequence[str], *, raw: bool) -> Array:
    """Matches, n-grams and lengths by group of sentences [g 10]; their sum gives sacreBLEU's corpus BLEU."""
    from sacrebleu.metrics.bleu import BLEU

    metric = BLEU(tokenize="13a" if raw else "none", lowercase=not raw, force=True)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        score = metric.corpus_score([hypothesis], [[reference]])
        rows.append([*score.counts, *score.totals, score.sys_len, score.ref_len])
    return grouped(np.array(rows, dtype=np.float64))
