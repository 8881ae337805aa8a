"""Squared sensitivity."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Taylor(MeasuredColumn):
    """Heads with a large squared first-order effect stay (Molchanov et al. 2019)."""

    name = "taylor"
    summary = "squared first-order effect of removing the head"
    column = "taylor"
    analysis = "taylor"
