"""Fluctuation of contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.closed_form.moments import ContextMoments
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion, scores_by_layer


@criterion
class Flap(Criterion):
    """Heads with a large variance of contexts, times the norm of W_O's columns, stay (An et al. 2023, FLAP, WIFV).

    var(x_j) · ‖W_:j‖² of every channel j, standardised over the channels of a layer (z-scores by the unbiased standard
    deviation) and averaged over the channels of a head. This is the paper's formula; the published code squares the
    metric of attention channels, and its running variance skips the first sequence.
    """

    name = "flap"
    summary = "variance of the head's contexts times its columns of W_O, standardised per layer (FLAP)"
    why = "their contexts vary least, so that a constant stands in for them"

    def scores(self, context: ScoringContext) -> Scores:
        return scores_by_layer(context, fluctuation)


def fluctuation(weight: Tensor, moments: ContextMoments) -> Tensor:
    """The mean z-score of the channels of each head [h], for W_O [d h k]; 0 where all channels are equal."""
    channels = moments.covariance.diagonal().clamp(min=0) * weight.flatten(1).square().sum(dim=0)  # [h·k]
    deviation = channels.std() if len(channels) > 1 else channels.new_zeros(())
    centred_channels = channels - channels.mean()
    z_scores = centred_channels / deviation if deviation > 0 else torch.zeros_like(centred_channels)
    return z_scores.view(weight.shape[1], -1).mean(dim=1)
