"""Propagation rules, written as what they do to a gradient on its way back through one operation.

Relevance of a tensor is tensor · gradient. A rule of layer-wise relevance propagation is then a backward pass
of its own for one kind of operation; linear operations keep their ordinary gradients:

| operation | rule | effect on the gradient g |
| --- | --- | --- |
| y = f(x), elementwise, f(0) = 0 | identity: all relevance to x | g · f(x)/x |
| normalisation | the deviation (or root mean square) is a constant | centre(g · weight) / deviation |
| product of two variables | uniform: half to each factor | g / 2 |
| factors of a mixture of experts (MAE) | constants | none to the gate |
| weights · V, Q · Kᵀ | a share for each factor | g · share, nothing for a share of 0 |
| softmax | temperature T: the weights S that softmax(x / T) gives | S ∘ (g − Σ g·S) |
| linear map z = Wx + b | epsilon: z stabilised in the denominator | g · z / (z + ε sign z) |

Sources: Bach et al. 2015 (epsilon); Ali et al. 2022, "XAI for Transformers" (weights and deviations as
constants); Achtibat et al. 2024, "AttnLRP" (identity, uniform; the softmax keeps its ordinary gradient, which is
their Deep Taylor rule); Edin et al. 2025, "GIM" (temperature, without the factor 1/T of softmax(x / T)'s own gradient).
Ali et al. have no gated feed-forward layers; every rule set here but `gradient` gives half of a product to each factor.
lxt's CP-LRP gives nothing to the gate there, so its numbers for `cp` differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """What one rule set does at each kind of operation; the defaults are the ordinary gradient.

    `product` is the share of each factor in a product of two variables (also of a gated activation), `weights`
    and `values` those in weights · V, `scores` that of queries and of keys in Q · Kᵀ. `weights` 0 makes every
    softmax a constant; `temperature` is that of its gradient, 1 the ordinary one. `epsilon` stabilises linear maps,
    relative to the root mean square of z over features.
    """

    activation: Literal["gradient", "identity"] = "gradient"
    norm: Literal["gradient", "constant"] = "gradient"
    product: float = 1.0
    weights: float = 1.0
    values: float = 1.0
    scores: float = 1.0
    temperature: float = 1.0
    epsilon: float | None = None

    @property
    def plain(self) -> bool:
        """Whether these are ordinary gradients."""
        return self == Rules()


def identity_rule(gradient: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """All relevance of y = f(x) goes to x: g · y / x, and nothing where x is 0.

    Achtibat et al. add 1e-10 to x; leaving zeros out has the same effect without changing the other values.
    """
    return (y / x).nan_to_num_(nan=0.0).mul_(gradient)


def constant_deviation(gradient: Tensor, weight: Tensor | None, inverse: Tensor, *, centred: bool) -> Tensor:
    """Back through (x − mean) · inverse · weight + bias with `inverse` [… 1] held constant.

    `centred` False is the root-mean-square norm, which subtracts no mean.
    """
    scaled = gradient * inverse
    if weight is not None:
        scaled *= weight
    return scaled.sub_(scaled.mean(dim=-1, keepdim=True)) if centred else scaled


def epsilon(gradient: Tensor, z: Tensor, size: float) -> Tensor:
    """g · z / (z + ε sign z) with ε = size · root mean square of z over its last axis (Montavon et al. 2019)."""
    margin = size * z.square().mean(dim=-1, keepdim=True).sqrt()
    return gradient * (z / torch.where(z < 0, z - margin, z + margin)).nan_to_num_(nan=0.0)


def tempered_softmax(gradient: Tensor, x: Tensor, *, temperature: float, dim: int) -> Tensor:
    """S ∘ (g − Σ g·S) with S = softmax(x / T) over `dim`: its gradient but for the factor 1/T (Edin et al. 2025).

    Where a softmax is sharp its own gradient vanishes, as the other keys make up for what one loses; a higher
    temperature lets them tell apart.
    """
    weights = torch.softmax(x / temperature, dim=dim, dtype=gradient.dtype)
    return weights * (gradient - (gradient * weights).sum(dim=dim, keepdim=True))


def shared(gradient: Tensor, share: float) -> Tensor | None:
    """g · share; None, which ends the backward pass there, for a share of 0."""
    if share == 0:
        return None
    return gradient if share == 1 else gradient * share
