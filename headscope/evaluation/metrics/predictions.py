"""BLEU (Papineni et al. 2002) and chrF (Popović 2015) as sacreBLEU computes them; perplexity.

And the metrics of classifiers: accuracy (also of tokens), macro-F1, and the loss.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import torch

from headscope.bootstrap import Array, Bootstrap, Estimate, interval
from headscope.data.batching import Omissions
from headscope.data.encoded import IGNORED
from headscope.evaluation.likelihood import Likelihood, hides_tokens, labelled_batches
from headscope.evaluation.metrics.base import (
    Floor,
    LikelihoodMetric,
    TranslationMetric,
    Translations,
    ValidationText,
    add_groups,
    metric,
    ratio_of,
    reference_texts,
    resample,
    total_and_count,
)
from headscope.evaluation.translation import RAW, TextMode
from headscope.formats.base import Checkpoint

if TYPE_CHECKING:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF


class SacreBleuMetric(TranslationMetric):
    """A corpus score of sacreBLEU, from sums of the counts that its `scorer` takes from sentences."""

    worst = 0.0

    @abstractmethod
    def scorer(self, text: TextMode = RAW) -> BLEU | CHRF:
        """The scorer of sacreBLEU for a mode of comparison."""

    def sums(self, read: Translations) -> Array:
        rows = self.scorer(read.text)._extract_corpus_statistics(read.hypotheses, [read.references])
        return add_groups(np.array(rows, dtype=np.float64))[:, None]

    def of(self, sums: Array) -> Array:
        scorer = self.scorer()
        return np.array([scorer._compute_score_from_stats(row).score for row in sums.tolist()])

    def signature(self, text: TextMode) -> str:
        scorer = self.scorer(text)
        scorer.corpus_score([""], [[""]])  # so that the signature has the number of references
        return str(scorer.get_signature())


@metric
class Bleu(SacreBleuMetric):
    """Corpus BLEU, from matches [4], n-grams [4] and both lengths; sacreBLEU has the lengths first."""

    name = "bleu"
    title = "BLEU"
    order = 10
    lost_sums = (0, 0, 0, 0, 1, 1, 1, 1, 1, 1)

    def scorer(self, text: TextMode = RAW) -> BLEU:
        from sacrebleu.metrics.bleu import BLEU

        return BLEU(tokenize=text.tokenize, lowercase=not text.raw, force=True)

    def sums(self, read: Translations) -> Array:
        return np.roll(super().sums(read), -2, axis=-1)

    def of(self, sums: Array) -> Array:
        return super().of(np.roll(sums, 2, axis=-1))

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(1.0, "near zero")


@metric
class Chrf(SacreBleuMetric):
    """Corpus chrF2, from counts of n-grams in translations, in references and in both, for each length of n-grams."""

    name = "chrf"
    title = "chrF2"
    order = 20
    lost_sums = (1, 1, 0)

    def scorer(self, text: TextMode = RAW) -> CHRF:
        from sacrebleu.metrics.chrf import CHRF

        return CHRF(lowercase=not text.raw)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        texts = reference_texts(checkpoint, data.corpus)
        floor_sums = self.sums(Translations([*texts[1:], *texts[:1]], texts, data.text)).sum(axis=0)
        return Floor(float(self.of(floor_sums)[0]), "what the translation of the next sentence reaches")


@metric
class Perplexity(LikelihoodMetric):
    """exp(Σ -log p / tokens) over all predicted tokens; an encoder alone predicts hidden tokens."""

    name = "perplexity"
    title = "perplexity"
    order = 30
    decimals = 2
    higher_is_better = False
    labels = False
    says_loss = True

    def of(self, sums: Array) -> Array:
        return perplexity(ratio_of(sums))

    def estimate(self, sums: Array, bootstrap: Bootstrap) -> Estimate:
        nats = interval(torch.from_numpy(resample(ratio_of, sums, bootstrap)))
        return Estimate(*map(perplexity, (nats.value, nats.low, nats.high)))

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(float(checkpoint.vocabularies[1]), "the number of pieces in the vocabulary, each as likely")

    def largest_loss(self, sums: Array) -> float:
        """The loss of one nat a token, since perplexity is unbounded."""
        return float(self.of(sums.sum(axis=0)[None])[0])

    def title_of(self, checkpoint: Checkpoint) -> str:
        return f"masked-token {self.title}" if hides_tokens(checkpoint) else self.title

    def columns(self, values: Array) -> dict[str, Array]:
        return {self.name: values}


def perplexity(nats: Array | float) -> Array:
    """exp of mean -log p; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return np.exp(nats)


@metric
class Accuracy(LikelihoodMetric):
    """Hits over labels, or over tokens."""

    name = "accuracy"
    worst = 0.0
    title = "accuracy"
    order = 50

    def sums(self, read: Likelihood) -> Array:
        return total_and_count(read.right)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        counts = label_counts(checkpoint, data)
        unit = "token" if checkpoint.predicts == "words" else "label"
        return Floor(max(counts.values()) / counts.total(), f"the share of the most frequent {unit}")

    def title_of(self, checkpoint: Checkpoint) -> str:
        return {"words": "token accuracy", "tags": "word accuracy"}.get(checkpoint.predicts, self.title)


def label_counts(checkpoint: Checkpoint, data: ValidationText) -> Counter[int]:
    """Counts of each true label; without labels, of each token to predict."""
    if data.corpus.has_labels:
        return Counter(label for line in data.corpus for label in (line.labels.ids if line.labels else ()))
    parts = labelled_batches(checkpoint, data.corpus, data.reading, Omissions())
    return Counter(label for part in parts for label in part.labels[part.labels != IGNORED].tolist())


@metric
class MacroF1(LikelihoodMetric):
    """Mean of 2 right / (predicted + true) over the labels that are predicted or true at least once.

    That is scikit-learn's `f1_score(average="macro")` without `labels`. For token classifiers it is over words, not
    over spans as in CoNLL's F1. Sums are [label 3]: the counts of right, predicted and true.
    """

    name = "macro-f1"
    worst = 0.0
    title = "macro-F1"
    order = 60
    words = False
    lost_sums = (0, 1, 1)

    def sums(self, read: Likelihood) -> Array:
        return read.classes.total[: read.classes.n_used].flatten(2).numpy()

    def of(self, sums: Array) -> Array:
        right, n_predicted, n_true = np.moveaxis(sums.reshape(len(sums), -1, 3), -1, 0)
        occurs = n_predicted + n_true > 0
        with np.errstate(invalid="ignore"):
            f1 = np.where(occurs, 2 * right / np.where(occurs, n_predicted + n_true, 1), 0.0)
            return f1.sum(axis=-1) / occurs.sum(axis=-1)

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        counts = label_counts(checkpoint, data)
        share = max(counts.values()) / counts.total()
        return Floor(2 * share / (1 + share) / len(counts), "what the most frequent label alone reaches")


@metric
class Loss(LikelihoodMetric):
    """Σ -log p / labels, in nats."""

    name = "loss"
    title = "loss (nats)"
    order = 40
    higher_is_better = False
    words = False
    says_loss = True

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        counts = label_counts(checkpoint, data)
        shares = [count / counts.total() for count in counts.values()]
        return Floor(-sum(share * math.log(share) for share in shares), "what the shares of the labels alone reach")

    def largest_loss(self, sums: Array) -> float:
        """One nat, since the loss is unbounded."""
        return 1.0

    def columns(self, values: Array) -> dict[str, Array]:
        return {}  # every table of likelihoods has nll_per_token
