"""Linear mixing by one matrix per attention module (Azov & Landau, "Multi-Head Rotation": alpha)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headscope.model.mixing.base import Mixing, Queries, mixing


@mixing("alpha.v1")
class Alpha(Mixing):
    """Z'[i] = Σ_j alpha[i, j] · Z[j] over the heads' contexts Z; alpha [h h] is the identity at the start.

    Nothing constrains alpha: rows need not sum to one and entries may be negative.
    """

    folds_in_training = True
    summary = "a matrix that mixes its heads linearly"

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        self.alpha = nn.Parameter(torch.eye(heads))

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        b, h, t, k = context.shape
        return torch.matmul(self.alpha, context.reshape(b, h, t * k)).view(b, h, t, k)

    @property
    def foldable(self) -> bool:
        return True

    @property
    def matrix(self) -> Tensor:
        return self.alpha

    def fold(self, w_o: Tensor) -> Tensor:
        """W_O · (alpha ⊗ I): column block j is Σ_i W_O[:, block i] · alpha[i, j]."""
        blocks = w_o.view(len(w_o), self.heads, self.d_value)  # [d h k]
        return torch.einsum("dik,ij->djk", blocks, self.alpha).reshape(w_o.shape)
