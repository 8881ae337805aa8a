"""Position embeddings: sinusoids in halves, and learned tables.

Positions are counted from 0 over real tokens; row `offset` of a table is that of position 0. Padding has position
`PADDING` and fairseq's embedding: the row before position 0 of a learned table (fairseq's padding index), else zero.
No real token attends to it, but the MHR fork counts padding in its statistics.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from headscope.errors import DataError


def sinusoids(length: int, width: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Rows 0 … length - 1 of the sinusoidal position embedding [length width].

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
    """Sinusoids by position; the table grows with longer texts and is not part of the checkpoint."""

    def __init__(self, width: int, offset: int = 0) -> None:
        super().__init__()
        self.width, self.offset = width, offset
        self._table: Tensor | None = None

    def forward(self, positions: Tensor, like: Tensor, *, bound: int) -> Tensor:
        """Embeddings [… t d] of positions [… t] below `bound`, with dtype and device of `like`; 0 for padding."""
        table = self._table
        if table is None or len(table) <= bound or table.dtype != like.dtype or table.device != like.device:
            length = max(256, 1 << (bound - 1).bit_length())
            table = sinusoids(length + self.offset, self.width, dtype=like.dtype, device=like.device)[self.offset :]
            self._table = table = torch.cat([torch.zeros_like(table[:1]), table])  # row 0: padding
        return nn.functional.embedding(positions - PADDING, table)


class LearnedPositions(nn.Embedding):
    """A learned row per position; with an offset the row before the first is that of padding, which is not trained."""

    def __init__(self, positions: int, width: int, offset: int = 0) -> None:
        super().__init__(positions + offset, width, padding_idx=offset - 1 if offset else None)
        self.offset = offset

    def forward(self, positions: Tensor, like: Tensor | None = None, *, bound: int = 0) -> Tensor:
        """Rows [… t d] of positions [… t] below `bound`; DataError where the table is too short."""
        last = self.num_embeddings - self.offset - 1
        if bound - 1 > last and int(positions.max()) > last:
            raise DataError(
                f"a text reaches position {int(positions.max())}, the model has learned {last + 1}; shorten it"
            )
        if self.offset:
            return super().forward(positions + self.offset)
        padding = positions == PADDING
        return super().forward(positions.masked_fill(padding, 0)).masked_fill(padding[..., None], 0)


def real_positions(real: Tensor) -> Tensor:
    """The number of real tokens before each token [b t]; `PADDING` for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real.bool(), PADDING)
