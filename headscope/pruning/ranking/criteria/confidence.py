"""Sharpness."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import Measured, criterion


@criterion
class Confidence(Measured):
    """Heads with large maximum weights stay (Voita et al. 2019, §4)."""

    name = "confidence"
    summary = "mean maximum attention weight"
    column = "confidence"
    analysis = "confidence"
