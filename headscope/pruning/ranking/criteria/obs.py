"""Reconstruction after a refit."""

from __future__ import annotations

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.closed_form.block_obs import RemovalStep
from headscope.pruning.closed_form.output_projections import output_projections
from headscope.pruning.closed_form.scoring import (
    error_when_gone,
    for_all_heads,
    moments_of,
    relative_error,
    removal_order,
)
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion


@criterion
class OptimalBrainSurgeon(Criterion):
    """Heads whose part of the layer's output the others cannot take over stay (block optimal brain surgeon).

    The squared error of a module's output after W_O was refitted without the head, over the energy of that output
    (Hassibi and Stork 1993 for blocks; the division makes modules comparable and is a convention). Greedy: each head
    is judged with all cheaper ones gone and the rest refitted, so the score is the sum of relative errors once it goes,
    and scoring again in steps adds nothing.
    """

    name = "obs"
    summary = "error of the layer's output without the head, the other heads refitted (optimal brain surgeon)"
    changes = False

    def scores(self, context: ScoringContext) -> Scores:
        moments, orders = moments_of(context), []
        for projection in output_projections(context.checkpoint):
            if (sums := moments.of(projection)) is not None:
                energy = sums.output_energy(projection.weight)
                steps = removal_order(projection, sums, candidates=context.candidates)
                orders.append((projection, [RemovalStep(n, relative_error(e, energy)) for n, e in steps]))
        return for_all_heads(context, error_when_gone(orders))
