"""Norm of contexts."""

from __future__ import annotations

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion, scores_by_layer


@criterion
class OutputNorm(Criterion):
    """Heads with large contexts stay: mean over tokens of the L2 norm (Muralidharan et al. 2024, Minitron)."""

    name = "output-norm"
    summary = "mean norm of the head's context (Minitron)"
    why = "their contexts are the shortest"

    def scores(self, context: ScoringContext) -> Scores:
        return scores_by_layer(context, lambda weight, moments: moments.norms / moments.tokens)
