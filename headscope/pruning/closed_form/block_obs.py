"""Optimal brain surgeon over blocks of columns: what removing a head costs once the other heads make up for it.

A linear layer y = W x [d m] is approximated without some blocks of x's entries, with second moments H = E[x xᵀ] [m m]
of its inputs and P = H⁻¹ (Hassibi and Stork 1993; blocks as in Frantar and Alistarh 2022, §4). All sums are over
tokens divided by their number, in float64. An error that is weighted by the Fisher matrix F [d d] of y, E[eᵀ F e], is
the plain one of F^½ W (`weigh`): F does not change which W is best, only what a block costs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.errors import NumericalError
from headscope.pruning.options.refit import DAMPING, check_damping

SINGULAR = 1e-12
"""A pivot of at most this share of the largest second moment is taken for a rounding error."""
SMALLEST = 1e-200
"""A mean second moment below this is none."""


@dataclass(frozen=True)
class Damped:
    """H + λI [m m], its lower Cholesky factor, λ, and how often λ was raised tenfold until there was one."""

    matrix: Tensor
    factor: Tensor
    damping: float
    raised: int = 0

    def inverse(self) -> Tensor:
        """(H + λI)⁻¹ [m m]."""
        inverse: Tensor = torch.cholesky_inverse(self.factor)
        return inverse


class RemovalStep(NamedTuple):
    """The block that goes next, and by how much the error grows then."""

    block: int
    error: float


def damp(second: Tensor, *, share: float = DAMPING) -> Damped:
    """H + λI for second moments H [m m], λ = `share` of H's mean diagonal, ten times more until it can be factorised.

    A matrix of zeros is damped as if its mean diagonal were one. ConfigError for a negative share, NumericalError for a
    matrix that is not finite.
    """
    check_damping(share)
    if not bool(second.isfinite().all()):
        raise NumericalError("second moments of contexts are NaN or infinite; take a wider --dtype")
    second = (second + second.T) / 2
    mean = float(second.diagonal().mean())
    scale = mean if mean > SMALLEST else 1.0
    damping, raised = share * scale, 0
    while True:
        matrix = second + damping * torch.eye(len(second)).to(second)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        smallest = SINGULAR * float(matrix.diagonal().max())
        if not failed and float(factor.diagonal().square().min()) > smallest:
            return Damped(matrix, factor, damping, raised)
        damping, raised = max(10 * damping, SINGULAR * scale), raised + 1


def weigh(weight: Tensor, fisher: Tensor) -> Tensor:
    """F^½ W [d m], up to a rotation of its rows, which no error depends on; F [d d] may be singular."""
    values, vectors = torch.linalg.eigh((fisher + fisher.T) / 2)  # [d], [d d]
    weighted: Tensor = values.clamp(min=0).sqrt()[:, None] * (vectors.T @ weight)
    return weighted


def block_errors(weight: Tensor, inverse: Tensor, blocks: Tensor) -> Tensor:
    """ε_g = tr(W_g [P_gg]⁻¹ W_gᵀ) [u]: the growth of E‖e‖² when block g goes and the rest is refitted.

    `blocks` [u n] has the columns of each of u blocks, none of them removed before.
    """
    parts = weight[:, blocks].permute(1, 2, 0)  # [u n d]
    corners = inverse[blocks[:, :, None], blocks[:, None, :]]  # [u n n]
    errors: Tensor = (parts * torch.linalg.solve(corners, parts)).sum(dim=(1, 2))
    return errors.clamp(min=0)


def remove_block(weight: Tensor, inverse: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """W [d m] and P [m m] without some columns [n]: the others of W refitted, P that of the inputs that are left.

    Both keep their shapes, with zeros where the columns were.
    """
    solved = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])  # [n m]
    weight = weight - weight[:, columns] @ solved
    inverse = inverse - inverse[:, columns] @ solved
    inverse = (inverse + inverse.T) / 2
    weight[:, columns] = 0
    inverse[:, columns] = 0
    inverse[columns] = 0
    return weight, inverse


def greedy_order(
    weight: Tensor, inverse: Tensor, blocks: Tensor, *, candidates: Collection[int] | None = None
) -> list[RemovalStep]:
    """Blocks in the order in which they go, the cheapest first, each judged with those before it gone.

    Only `candidates` go (None: all of the `blocks` [u n]). The errors add up to that of removing them together.
    """
    left = sorted(range(len(blocks)) if candidates is None else candidates)
    steps = []
    while left:
        errors = block_errors(weight, inverse, blocks[left])
        best = int(errors.argmin())
        block = left.pop(best)
        steps.append(RemovalStep(block, float(errors[best])))
        weight, inverse = remove_block(weight, inverse, blocks[block])
    return steps
