"""Where tokens stand: sinusoids in halves, and learned tables.

Places are counted from 0 over real tokens; row `offset` of a table belongs to place 0. Padding stands at `PADDING`
and has fairseq's position: the row before place 0 of a learned table (fairseq's padding index), otherwise zero.
No real token sees it, but the MHR fork counts padding in its statistics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headscope.errors import DataError


def sinusoids(length: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows 0 … length - 1 of the position signal [length width].

    Row p is [sin(p·w_0), …, sin(p·w_{n-1}), cos(p·w_0), …] with n = width / 2 and
    w_k = exp(-k · ln 10000 / (n - 1)), halves side by side and not interleaved as in Vaswani et al. 2017,
    §3.5; an odd width gets one zero column. fairseq and story-of-heads agree on this and compute it in
    single precision, which decides about the last digits of far positions.
    """
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=exact, device=device) * -(math.log(10000) / max(half - 1, 1)))
    angles = torch.arange(length, dtype=exact, device=device)[:, None] * rates
    table = torch.cat([angles.sin(), angles.cos(), angles.new_zeros(length, width % 2)], dim=1)
    return table.to(dtype)


PADDING = -1


class SinusoidalPositions(nn.Module):
    """Sinusoids by place; the table grows as longer texts come and is no part of the checkpoint."""

    def __init__(self, width: int, offset: int = 0) -> None:
        super().__init__()
        self.width, self.offset = width, offset
        self._table: Tensor | None = None

    def forward(self, places: Tensor, like: Tensor, *, bound: int) -> Tensor:
        """Signal [… t d] of places [… t] below `bound`, in the type and place of `like`; 0 for padding."""
        table = self._table
        if table is None or len(table) <= bound or table.dtype != like.dtype or table.device != like.device:
            length = max(256, 1 << (bound - 1).bit_length())
            table = sinusoids(length + self.offset, self.width, dtype=like.dtype, device=like.device)[self.offset :]
            self._table = table = torch.cat([torch.zeros_like(table[:1]), table])  # row 0: padding
        return nn.functional.embedding(places - PADDING, table)


class LearnedPositions(nn.Embedding):
    """A learned row per place; with an offset the row before the first one is that of padding, which never learns."""

    def __init__(self, places: int, width: int, offset: int = 0) -> None:
        super().__init__(places + offset, width, padding_idx=offset - 1 if offset else None)
        self.offset = offset

    def forward(self, places: Tensor, like: Tensor | None = None, *, bound: int = 0) -> Tensor:
        """Rows [… t d] of places [… t] below `bound`; DataError where the table ends before."""
        last = self.num_embeddings - self.offset - 1
        if bound - 1 > last and int(places.max()) > last:
            raise DataError(
                f"a text reaches position {int(places.max())}, the model has learned {last + 1}; shorten it"
            )
        if self.offset:
            return super().forward(places + self.offset)
        padding = places == PADDING
        return super().forward(places.masked_fill(padding, 0)).masked_fill(padding[..., None], 0)


def real_positions(real: Tensor) -> Tensor:
    """How many real tokens precede each token [b t]; `PADDING` for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real.bool(), PADDING)
