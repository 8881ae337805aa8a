"""A criterion: heads of the last layers go first."""

from __future__ import annotations

from headscope.engine.faithfulness.orders import Scores
from headscope.heads import all_heads
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion


@criterion
class LastLayer(Criterion):
    """Minus the number of the layer, so that the last layers have the lowest scores."""

    name = "last_layer"
    summary = "the last layers go first"
    reads_text = False
    changes = False

    def scores(self, question: ScoringContext) -> Scores:
        return {head: -float(head.layer) for head in all_heads(question.checkpoint.layout)}
