"""Sharpness."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Confidence(MeasuredColumn):
    """Heads with large maximum weights stay (Voita et al. 2019, §4)."""

    name = "confidence"
    summary = "mean maximum attention weight"
    column = "confidence"
    analysis = "confidence"
