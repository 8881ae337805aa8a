"""The cost of closing a head, estimated by the gradient of its gate at every token."""

from __future__ import annotations

from headscope.data.corpus import check_predictions
from headscope.engine.faithfulness.orders import Scores
from headscope.heads import HeadId
from headscope.pruning.ranking.criterion import (
    Criterion,
    ScoringContext,
    criterion,
    for_all_heads,
    moments_of,
    reached_modules,
)


@criterion
class TokenFisher(Criterion):
    """Heads whose gates the objective depends on at many tokens stay (Fisher information of a gate at each token).

    ½ Σ_t (∂ℓ/∂g_t)² of the objective ℓ, divided by predictions: the second-order estimate of the cost of closing the
    gate. The gate of a key/value group multiplies the contexts of all its heads. One backward pass gives all scores,
    which are comparable between layers. Removed heads are masked, nothing is refitted.
    """

    name = "fisher"
    summary = "Fisher information of a gate on the head at every token: what the objective loses without it, estimated"
    why = "the objective depends least on their gates"
    explains = probes = True

    def scores(self, context: ScoringContext) -> Scores:
        moments, scores = moments_of(context, gradients=True, heads_off=context.removed), dict[HeadId, float]()
        check_predictions(moments.predictions, context.text.name)
        for projection, sums in reached_modules(context, moments):
            if sums.gates is not None:
                for unit in projection.units:
                    heads = sorted({head.head for head in unit})
                    value = float(sums.gates[heads][:, heads].sum()) / (2 * moments.predictions)
                    scores.update(dict.fromkeys(unit, value))
        return for_all_heads(context, scores)
