"""Perplexity: exp of the mean -log p of a token."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array
from headscope.evaluation.likelihood import Likelihood, likelihood
from headscope.evaluation.metrics.base import (
    Floor,
    Metric,
    SentenceScores,
    ValidationText,
    group_columns,
    metric,
    ratio_of,
)
from headscope.formats.base import Checkpoint


@metric
class Perplexity(Metric):
    """exp(Σ -log p / tokens), of the tokens that `headscope.evaluation.likelihood` says."""

    name = "perplexity"
    title = "perplexity"
    higher_is_better = False

    @classmethod
    def applies(cls, checkpoint: Checkpoint, *, has_target: bool, has_labels: bool) -> str | None:
        if checkpoint.predicts != "words":
            return "needs a model that predicts words"
        if checkpoint.two_sided is has_target:
            return None
        return "needs --target and --valid-target, the translations" if checkpoint.two_sided else "reads one side only"

    def of(self, sums: Array) -> Array:
        with np.errstate(over="ignore"):
            values: Array = np.exp(ratio_of(sums))
            return values

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(float(checkpoint.vocabulary), "the number of pieces in the vocabulary, each as likely")

    def score(self, checkpoint: Checkpoint, data: ValidationText) -> SentenceScores:
        loss = token_loss(checkpoint, data)
        return SentenceScores(loss, loss)


def whole_likelihood(checkpoint: Checkpoint, data: ValidationText) -> Likelihood:
    """The likelihood of all sentences; KeyboardInterrupt where it was interrupted."""
    scored = likelihood(checkpoint, data.corpus, data.reading)
    if not scored.complete:
        raise KeyboardInterrupt
    return scored


def token_loss(checkpoint: Checkpoint, data: ValidationText) -> Array:
    """Σ -log p of tokens, and how many they are, by group of sentences [g 2]."""
    return group_columns(whole_likelihood(checkpoint, data).nll)
