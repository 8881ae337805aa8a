"""Fluctuation."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.closed_form.moments import ContextMoments
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion, scores_by_layer


@criterion
class Flap(Criterion):
    """Heads whose contexts vary, times the columns of W_O that read them, stay (An et al. 2023, FLAP, WIFV).

    var(x_j) · ‖W_:j‖² of every channel, standardised over the channels of a layer (z-scores by the unbiased standard
    deviation), averaged over the head's. The published code squares the metric of attention channels and its
    running variance skips the first sequence; here it is the paper's formula with the plain variance.
    """

    name = "flap"
    summary = "variance of the head's contexts times its columns of W_O, standardised per layer (FLAP)"
    why = "their contexts vary least, so that a constant stands in for them"

    def scores(self, context: ScoringContext) -> Scores:
        return scores_by_layer(context, fluctuation)


def fluctuation(weight: Tensor, moments: ContextMoments) -> Tensor:
    """Mean z-score of the channels of each head [h], for W_O [d h k]; 0 where all channels are alike."""
    channels = moments.covariance.diagonal().clamp(min=0) * weight.flatten(1).square().sum(dim=0)  # [h·k]
    spread = channels.std() if len(channels) > 1 else channels.new_zeros(())
    centred_channels = channels - channels.mean()
    z_scores = centred_channels / spread if spread > 0 else torch.zeros_like(centred_channels)
    return z_scores.view(weight.shape[1], -1).mean(dim=1)
