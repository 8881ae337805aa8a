"""Reconstruction after a refit."""

from __future__ import annotations

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion
from headscope.pruning.ranking.scoring import error_when_gone, for_all_heads, moments_of, reached_modules, removal_order


@criterion
class OptimalBrainSurgeon(Criterion):
    """Heads whose part of the layer's output the others cannot take over stay (block optimal brain surgeon).

    The squared error of a module's output after W_O was refitted without the head (Hassibi and Stork 1993 for blocks).
    Errors of different modules are compared as they are: modules write into the same residual stream. Relative to
    the energy of each module's output, as is often done, they chose worse in every case tried (benchmarks/pruning).
    Greedy: each head is judged with all cheaper ones gone and the rest refitted, so the score is the sum of errors once
    it goes, and scoring again in steps adds nothing.
    """

    name = "obs"
    summary = "error of the layer's output without the head, the other heads refitted (optimal brain surgeon)"
    why = "the other heads, refitted, make up for them best"
    changes = False
    refits = True

    def scores(self, context: ScoringContext) -> Scores:
        modules = reached_modules(context, moments_of(context))
        orders = [(projection, removal_order(context, projection, sums)) for projection, sums in modules]
        return for_all_heads(context, error_when_gone(orders))
