"""Products of a matrix with itself, for less than a general product costs."""

from __future__ import annotations

from torch import Tensor


def gram(flat: Tensor) -> Tensor:
    """flatᵀ flat of [n d]: halves are multiplied and the lower left quarter is copied, again in each half."""
    width = flat.shape[1]
    if width < 128:
        return flat.T @ flat
    half = width // 2
    found = flat.new_empty(width, width)
    found[:half, :half], found[half:, half:] = gram(flat[:, :half]), gram(flat[:, half:])
    found[:half, half:] = flat[:, :half].T @ flat[:, half:]
    found[half:, :half] = found[:half, half:].T
    return found
