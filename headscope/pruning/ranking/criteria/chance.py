"""Random scores, the baseline of all criteria."""

from __future__ import annotations

import numpy as np

from headscope.engine.faithfulness.orders import Scores
from headscope.heads import all_heads
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion


@criterion
class Random(Criterion):
    """Uniform random numbers, drawn by the seed."""

    name = "random"
    summary = "random numbers, by the seed"
    why = "the order is drawn from the seed"
    reads_text = False
    sampled = True
    changes = False

    def scores(self, context: ScoringContext) -> Scores:
        heads = list(all_heads(context.checkpoint.layout))
        values = np.random.default_rng([context.options.seed, len(heads)]).random(len(heads)).tolist()
        return dict(zip(heads, values, strict=True))
