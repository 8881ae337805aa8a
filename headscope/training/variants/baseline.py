"""The plain Transformer."""

from __future__ import annotations

from headscope.training.variant import Variant, variant


@variant
class Baseline(Variant):
    """Nothing but the engine."""

    name = "baseline"
    summary = "The plain Transformer."
    uses_all = True
    alone = "it is training without any variant"
