"""Moments of several texts as if they were one text, of which each has a given share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headscope.pruning.closed_form.moments import ContextMoments, Moments
from headscope.pruning.closed_form.output_projections import OutputProjection


@dataclass(frozen=True)
class Mixture:
    """Moments of texts with weights that add up to one; the first text is the one that is calibrated on.

    Those of a module are added up when they are asked for, so that the sums of one module are in memory.
    """

    parts: Sequence[tuple[Moments, float]]

    def of(self, projection: OutputProjection) -> ContextMoments | None:
        """E x = Σ w E_i x, E x xᵀ = Σ w E_i x xᵀ; norms, Fisher matrix and tokens are the first text's.

        None where the first text did not reach the module.
        """
        return weighted([(part.of(projection), weight) for part, weight in self.parts])


def weighted(parts: Sequence[tuple[ContextMoments | None, float]]) -> ContextMoments | None:
    """The weighted mean of moments, as sums over the tokens of the first; texts that reach nothing are left out."""
    first = parts[0][0]
    if first is None:
        return None
    there = [(part, weight) for part, weight in parts if part is not None and weight]
    if there == [(first, there[0][1])]:
        return first
    whole = sum(weight for _, weight in there)
    shares = [(part, weight / whole * first.tokens / part.tokens) for part, weight in there]
    total, products = first.total.new_zeros(first.total.shape), first.products.new_zeros(first.products.shape)
    for part, share in shares:
        total += share * part.total
        products += share * part.products
    return ContextMoments(first.tokens, total, products, first.norms, first.fisher)
