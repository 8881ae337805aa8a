"""Sensitivity."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Gradient(MeasuredColumn):
    """Heads whose gate the loss is sensitive to stay (Michel et al. 2019, §4.1)."""

    name = "gradient"
    summary = "mean absolute gradient of the loss by the head's gate"
    column = "gradient"
    analysis = "gradient"
