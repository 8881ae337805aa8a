"""Products of a matrix with itself, for less than a general product costs."""

from __future__ import annotations

import torch
from torch import Tensor


def gram(flat: Tensor, *, out: Tensor | None = None) -> Tensor:
    """flatᵀ flat of [n d], written to `out` if given: the lower left quarter is a copy, again in each half."""
    width = flat.shape[1]
    found = flat.new_empty(width, width) if out is None else out
    if width < 128:
        return torch.mm(flat.T, flat, out=found)
    half = width // 2
    gram(flat[:, :half], out=found[:half, :half])
    gram(flat[:, half:], out=found[half:, half:])
    torch.mm(flat[:, :half].T, flat[:, half:], out=found[:half, half:])
    found[half:, :half] = found[:half, half:].T
    return found
