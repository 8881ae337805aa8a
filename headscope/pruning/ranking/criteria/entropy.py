"""Dispersion."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Entropy(MeasuredColumn):
    """Heads that look at few places stay: low entropy is kept."""

    name = "entropy"
    summary = "entropy of attention, the lowest stay"
    column = "entropy"
    analysis = "entropy"
    sign = -1.0
