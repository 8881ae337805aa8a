"""Products of a matrix with itself, for less than a general product costs."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS = 64


def gram(flat: Tensor) -> Tensor:
    """flatᵀ flat of [n d] or [l n d]: what lies right of the diagonal, by strips of `ROWS` rows, and its mirror image.

    On an accelerator it is one product, of all l at once.
    """
    if flat.device.type != "cpu":
        return flat.transpose(-1, -2) @ flat
    if flat.ndim == 3:
        return torch.stack([gram(part) for part in flat]) if len(flat) > 1 else gram(flat[0])[None]
    width = flat.shape[1]
    product = flat.new_empty(width, width)
    for top in range(0, width, ROWS):
        strip = slice(top, top + ROWS)
        torch.mm(flat[:, strip].T, flat[:, top:], out=product[strip, top:])
        product[top + ROWS :, strip] = product[strip, top + ROWS :].T
    return product
