"""A mixing of heads: some of the neighbour's context is added to each head's own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headscope.model.mixing.base import Mixing, Queries, mixing


@mixing("neighbour.v1")
class Neighbour(Mixing):
    """Z'[i] = Z[i] + strength · Z[i - 1], the first head after the last; strength is 0 at the start."""

    summary = "some of the neighbour's context in that of each of its heads"
    foldable = True

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        self.strength = nn.Parameter(torch.zeros(()))

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return context + self.strength * context.roll(1, dims=1)

    def fold(self, w_o: Tensor) -> Tensor:
        blocks = w_o.view(len(w_o), self.heads, self.d_value)
        return (blocks + self.strength * blocks.roll(-1, dims=1)).reshape(w_o.shape)
