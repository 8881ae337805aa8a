"""Reconstruction after a refit inside modules, the measured objective between them."""

from __future__ import annotations

from headscope.engine.faithfulness.orders import Scores
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion
from headscope.pruning.ranking.scoring import measured_scores, moments_of, reached_modules, removal_order


@criterion
class MeasuredOptimalBrainSurgeon(Criterion):
    """Inside a module the order of `obs`; between modules what the objective loses once all of them are refitted.

    The next head goes from the module where that does the least damage, measured with W_O refitted everywhere:
    a few hundred passes over a fourth of the sentences, 16 to 128, which no refit is fitted to. The score is
    the damage once the head is gone.
    """

    name = "obs-measured"
    summary = "as obs inside a layer; between layers what the model loses after refitting, measured (slow)"
    why = "the model loses least without them, the other heads refitted"
    changes = False
    one_pass = False
    explains = True
    refits = True

    def scores(self, context: ScoringContext) -> Scores:
        modules = reached_modules(context, moments_of(context))
        orders = [(each, [step.block for step in removal_order(context, each, sums)]) for each, sums in modules]
        return measured_scores(context, orders)
