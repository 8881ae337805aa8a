"""Size of weights."""

from __future__ import annotations

from headscope.pruning.ranking.criterion import MeasuredColumn, criterion


@criterion
class Magnitude(MeasuredColumn):
    """Heads with a large slice of W_O stay; needs no text, and does not change when others go."""

    name = "magnitude"
    summary = "norm of the head's slice of W_O"
    column = "magnitude"
    analysis = "magnitude"
    reads_text = False
    changes = False
