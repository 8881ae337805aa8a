"""Weights times activations."""

from __future__ import annotations

from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.closed_form.moments import ContextMoments
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion, scores_by_layer


@criterion
class Wanda(Criterion):
    """Heads with large weights on large activations stay: mean of |W_ij| · ‖x_j‖ (Sun et al. 2023, Wanda).

    Wanda compares single weights within a row of W; here its metric is averaged over a head's columns of W_O. The norm
    of x_j is replaced by its root mean square over tokens, which differs by one factor for each site.
    """

    name = "wanda"
    summary = "mean |weight| times activation norm over the head's columns of W_O (Wanda)"
    why = "their weights times activations are the smallest"

    def scores(self, context: ScoringContext) -> Scores:
        return scores_by_layer(context, weights_times_activations)


def weights_times_activations(weight: Tensor, moments: ContextMoments) -> Tensor:
    """The mean of |W_ij| · rms(x_j) over the columns of each head [h], for W_O [d h k]."""
    rms = moments.second.diagonal().clamp(min=0).sqrt().view(weight.shape[1:])  # [h k]
    return (weight.abs() * rms).mean(dim=(0, 2))
