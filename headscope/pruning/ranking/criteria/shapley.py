"""A head's share in what all do together."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Shapley(MeasuredColumn):
    """Heads with large Shapley values stay (Castro et al. 2009, sampled orders)."""

    name = "shapley"
    summary = "Shapley value of the head for the objective"
    column = "shapley"
    analysis = "shapley"
