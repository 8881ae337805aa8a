"""Relevance."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Lrp(MeasuredColumn):
    """Heads that the predictions get their relevance from stay (Voita et al. 2019, §4)."""

    name = "lrp"
    summary = "relevance for what the model says"
    column = "lrp"
    analysis = "lrp"
