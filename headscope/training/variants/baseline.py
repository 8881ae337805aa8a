"""The plain Transformer."""

from __future__ import annotations

from headscope.training.variant import Variant, variant


@variant
class Baseline(Variant):
    """Cross entropy alone, of a model as its preset and the options of its size make it."""

    name = "baseline"
    summary = "The plain Transformer."
    uses_all = True
    alone = "it is training without any variant"
