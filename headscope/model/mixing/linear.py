"""Linear mixing: one factor per head, or one matrix per attention module.

The matrix is alpha of Azov & Landau's "Multi-Head Rotation"; the factors are gates that a checkpoint of story-of-heads
brings along (`gate/log_a`, `alive_heads`). They stand in the mixing slot so that they are part of the model (saved,
folded, read by analyses); gates that are tried out on a model are `headscope.model.taps`.
"""

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


LOW, HIGH, TEMPERATURE = -0.1, 1.1, 0.33


def hard_concrete(log_a: Tensor) -> Tensor:
    """Gates [h] of the trained model: sigmoid(log_a), stretched to [-0.1, 1.1] and clipped (Louizos et al. 2018)."""
    return (torch.sigmoid(log_a) * (HIGH - LOW) + LOW).clamp(0, 1)


def open_probability(log_a: Tensor, *, fully: bool = False) -> Tensor:
    """P(gate ≠ 0) in training, at temperature 0.33; `fully`: P(gate = 1)."""
    shift = TEMPERATURE * torch.log(torch.tensor(-LOW / HIGH, dtype=log_a.dtype))
    return torch.sigmoid(log_a + shift if fully else log_a - shift)


class HeadGates(Mixing):
    """Z'[i] = gate[i] · Z[i]."""

    summary = "a gate on each of its heads"

    def gates(self) -> Tensor:
        """The factors [h]."""
        raise NotImplementedError

    @property
    def foldable(self) -> bool:
        return True

    def forward(self, context: Tensor, queries: Queries) -> Tensor:
        return context * self.gates()[:, None, None]

    def fold(self, w_o: Tensor) -> Tensor:
        """Column block i times gate[i]."""
        return (w_o.view(len(w_o), self.heads, self.d_value) * self.gates()[:, None]).reshape(w_o.shape)


@mixing("hard-concrete.v1")
class HardConcrete(HeadGates):
    """Hard concrete gates without their noise, which belongs to learning them (Voita et al. 2019, §5.1)."""

    identity_at_start = False

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        bound = (3 / max(heads, 1)) ** 0.5  # Glorot, as the original starts
        self.log_a = nn.Parameter(torch.empty(heads).uniform_(-bound, bound))

    def gates(self) -> Tensor:
        return hard_concrete(self.log_a)

    def gate_logits(self) -> Tensor:
        return self.log_a


@mixing("alive.v1")
class Alive(HeadGates):
    """Heads switched on or off for good: a fixed 0 or 1 for each."""

    alive: Tensor

    def __init__(self, *, heads: int, d_value: int, d_model: int) -> None:
        super().__init__(heads=heads, d_value=d_value, d_model=d_model)
        self.register_buffer("alive", torch.ones(heads))

    def gates(self) -> Tensor:
        return self.alive
