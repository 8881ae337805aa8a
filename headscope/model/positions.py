"""Where tokens stand: sinusoids in halves, and learned tables."""

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


class SinusoidalPositions(nn.Module):
    """Sinusoids by row number; the table grows as longer texts come and is no part of the checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self._table: Tensor | None = None

    def forward(self, rows: Tensor, like: Tensor, *, bound: int) -> Tensor:
        """Signal [… t d] of row numbers [… t] below `bound`, in the type and place of `like`."""
        table = self._table
        if table is None or len(table) < bound or table.dtype != like.dtype or table.device != like.device:
            length = max(256, 1 << (bound - 1).bit_length())
            self._table = table = sinusoids(length, self.width, dtype=like.dtype, device=like.device)
        return nn.functional.embedding(rows, table)


class LearnedPositions(nn.Embedding):
    """A learned row per position."""

    def forward(self, rows: Tensor, like: Tensor | None = None, *, bound: int = 0) -> Tensor:
        """Rows [… t d] of row numbers [… t] below `bound`; DataError where the table ends before."""
        if bound > self.num_embeddings and int(rows.max()) >= self.num_embeddings:
            raise DataError(
                f"a text reaches position {int(rows.max())}, the model has learned {self.num_embeddings}; shorten it"
            )
        return super().forward(rows)


def real_positions(real: Tensor) -> Tensor:
    """How many real tokens precede each token [b t]; padding gets the number of a neighbour."""
    return (real.long().cumsum(dim=1) - 1).clamp_min(0)
