"""Perplexity: exp of the mean -log p of a token."""

from __future__ import annotations

import numpy as np
import torch

from headscope.bootstrap import Array, Bootstrap, Estimate, interval
from headscope.evaluation.likelihood import hides_tokens
from headscope.evaluation.metrics.base import Floor, LikelihoodMetric, ValidationText, metric, ratio_of, resampled
from headscope.formats.base import Checkpoint


@metric
class Perplexity(LikelihoodMetric):
    """exp(Σ -log p / tokens), of all tokens that are predicted; an encoder alone predicts hidden ones."""

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
        nats = interval(torch.from_numpy(resampled(ratio_of, sums, bootstrap)))
        return Estimate(*map(perplexity, (nats.value, nats.low, nats.high)))

    def floor(self, checkpoint: Checkpoint, data: ValidationText) -> Floor:
        return Floor(float(checkpoint.vocabularies[1]), "the number of pieces in the vocabulary, each as likely")

    def largest_loss(self, sums: Array) -> float:
        """A nat a token, as perplexity has no range."""
        return float(self.of(sums.sum(axis=0)[None])[0])

    def title_of(self, checkpoint: Checkpoint) -> str:
        return f"masked-token {self.title}" if hides_tokens(checkpoint) else self.title

    def columns(self, values: Array) -> dict[str, Array]:
        return {self.name: values}


def perplexity(nats: Array | float) -> Array:
    """Of means of -log p; infinite where it is too large for a number."""
    with np.errstate(over="ignore"):
        values: Array = np.exp(nats)
        return values
