"""Error of the layer's output after a refit, weighted by the objective's gradients."""

from __future__ import annotations

from headscope.data.corpus import check_predictions
from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.closed_form.refit import weigh
from headscope.pruning.ranking.criterion import (
    Criterion,
    ScoringContext,
    criterion,
    cumulative_scores,
    moments_of,
    reached_modules,
)


@criterion
class TaskOptimalBrainSurgeon(Criterion):
    """As `obs`, with errors weighted by the Fisher matrix F of the module's output (the objective's gradients).

    ½ tr(F E C Eᵀ) for a token, with E the change of W_O and C the covariance of contexts, is the second-order estimate
    of the objective's loss if errors and gradients are independent. It is summed over tokens and divided by
    predictions, so all modules are comparable.
    """

    name = "obs-task"
    summary = "as obs, errors weighted by the gradient of the objective at the layer's output"
    why = "the objective loses least without them, the other heads refitted"
    changes = False
    refits = True
    explains = probes = True

    def scores(self, context: ScoringContext) -> Scores:
        moments = moments_of(context, gradients=True)
        check_predictions(moments.predictions, context.text.name)
        weighted_modules = (
            (projection, sums, weigh(projection.weight, sums.fisher / (2 * moments.predictions)))
            for projection, sums in reached_modules(context, moments)
            if sums.fisher is not None
        )
        return cumulative_scores(context, weighted_modules)
