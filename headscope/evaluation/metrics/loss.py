"""The loss of a classifier: the mean -log p of the right label."""

from __future__ import annotations

import math

from headscope.bootstrap import Array
from headscope.evaluation.metrics.accuracy import label_counts
from headscope.evaluation.metrics.base import Floor, LikelihoodMetric, ValidationText, metric
from headscope.formats.base import Checkpoint


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

    def columns(self, values: Array) -> dict[str, Array]:
        return {}  # every table of likelihoods has nll_per_token
