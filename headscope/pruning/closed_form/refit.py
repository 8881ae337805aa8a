"""Replacements of removed columns of a linear layer (zeros, their mean, a refit of the others) and their error.

The cost of a block of columns is that of the optimal brain surgeon. A layer y = W x, W [d m], is approximated without
some blocks of x's entries, from second moments H = E[x xᵀ] [m m] of its inputs and P = H⁻¹ (Hassibi and Stork 1993;
blocks as in Frantar and Alistarh 2022, §4). Expectations E are means over tokens, in float64. An error weighted by the
Fisher matrix F [d d] of y, E[eᵀ F e], is the unweighted error of F^½ W (`weigh`): F does not change which W is best,
only the cost of a block. A refit replaces removed columns G by new values of the kept columns K, and by a shift of the
bias β where the layer has one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.errors import ConfigError, NumericalError, flag
from headscope.pruning.closed_form.moments import ContextMoments
from headscope.pruning.options.shared import DAMPING

SINGULAR = 1e-12
"""A pivot of at most this share of the largest second moment counts as a rounding error."""
SMALLEST = 1e-200
"""A mean second moment below this counts as zero."""


@dataclass(frozen=True)
class Damped:
    """H + λI [m m], its lower Cholesky factor, λ, and how often λ was raised tenfold until the factor existed."""

    matrix: Tensor
    factor: Tensor
    damping: float
    times_raised: int = 0

    def inverse(self) -> Tensor:
        """(H + λI)⁻¹ [m m]."""
        return torch.cholesky_inverse(self.factor)


class RemovalStep(NamedTuple):
    """The block to remove next, and the growth of the error by its removal."""

    block: int
    error: float


def damp(second: Tensor, *, share: float = DAMPING) -> Damped:
    """H + λI for second moments H [m m], with λ a `share` of H's mean diagonal, raised tenfold until it has a factor.

    A matrix of zeros is damped as if its mean diagonal were one. NumericalError for a matrix that is not finite.
    """
    if not bool(second.isfinite().all()):
        raise NumericalError(f"second moments of contexts are NaN or infinite; take a wider {flag.dtype}")
    second = (second + second.T) / 2
    mean = float(second.diagonal().mean())
    scale = mean if mean > SMALLEST else 1.0
    damping, times = share * scale, 0
    while True:
        matrix = second + damping * torch.eye(len(second)).to(second)
        factor, info = torch.linalg.cholesky_ex(matrix)
        smallest = SINGULAR * float(matrix.diagonal().max())
        if not info and float(factor.diagonal().square().min()) > smallest:
            return Damped(matrix, factor, damping, times)
        damping, times = max(10 * damping, SINGULAR * scale), times + 1


def weigh(weight: Tensor, fisher: Tensor) -> Tensor:
    """F^½ W [d m] for W [d m] and F [d d], up to a rotation of its rows that changes no error; F may be singular."""
    values, vectors = torch.linalg.eigh((fisher + fisher.T) / 2)  # [d], [d d]
    return values.clamp(min=0).sqrt()[:, None] * (vectors.T @ weight)


def block_errors(weight: Tensor, inverse: Tensor, blocks: Tensor) -> Tensor:
    """ε_g = tr(W_g [P_gg]⁻¹ W_gᵀ) [u]: the growth of E‖e‖² when block g is removed and the other columns are refitted.

    `blocks` [u n] has the columns of each of u blocks, none of them removed before.
    """
    parts = weight[:, blocks].permute(1, 2, 0)  # [u n d]
    corners = inverse[blocks[:, :, None], blocks[:, None, :]]  # [u n n]
    # not batched: torch 2.13 with MKL fails on batches of matrices of 160 rows or more after set_num_threads
    solution = torch.stack([torch.linalg.solve(corner, part) for corner, part in zip(corners, parts, strict=True)])
    return (parts * solution).sum(dim=(1, 2)).clamp(min=0)


def remove_block(weight: Tensor, inverse: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """W [d m] refitted without some columns [n], and P [m m] of the other inputs; zeros in place of these columns."""
    solution = torch.linalg.solve(inverse[columns][:, columns], inverse[columns])  # [n m]
    weight = weight - weight[:, columns] @ solution
    inverse = inverse - inverse[:, columns] @ solution
    inverse = (inverse + inverse.T) / 2
    weight[:, columns] = 0
    inverse[:, columns] = 0
    inverse[columns] = 0
    return weight, inverse


def greedy_order(
    weight: Tensor, inverse: Tensor, blocks: Tensor, *, candidates: Collection[int] | None = None
) -> list[RemovalStep]:
    """Remove the cheapest of the `blocks` [u n] again and again, and refit after each; returns the steps in order.

    Only `candidates` are removed (None: all). The errors add up to that of removing the blocks together.
    """
    remaining = sorted(range(len(blocks)) if candidates is None else candidates)
    steps = []
    while remaining:
        errors = block_errors(weight, inverse, blocks[remaining])
        best = int(errors.argmin())
        block = remaining.pop(best)
        steps.append(RemovalStep(block, float(errors[best])))
        weight, inverse = remove_block(weight, inverse, blocks[block])
    return steps


@dataclass(frozen=True)
class SolvedRefit:
    """W [d m] with zeros in the removed columns, the shift of β [d], λ, and how often λ was raised tenfold."""

    weight: Tensor
    shift: Tensor
    damping: float = 0.0
    times_raised: int = 0


def interpolate(removal: SolvedRefit, refit: SolvedRefit, strength: float) -> SolvedRefit:
    """Interpolate between removal without a refit (`strength` 0) and a refit (1)."""
    if strength == 1:
        return refit
    weight = torch.lerp(removal.weight, refit.weight, strength)
    return replace(refit, weight=weight, shift=torch.lerp(removal.shift, refit.shift, strength))


def compensation(
    method: str, weight: Tensor, columns_gone: Tensor, moments: ContextMoments, *, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """The refit of `weight` [d m] without some columns [n], given the moments of inputs [m].

    "none" sets the columns to zero; "mean" also shifts β by their mean output, W_G μ_G; "least-squares" is
    `least_squares`. `affine`: β may be shifted. ConfigError for a mean without β.
    """
    if method == "least-squares":
        return least_squares(weight, columns_gone, moments, affine=affine, share=share)
    shift = weight.new_zeros(len(weight))
    if method == "mean":
        if not affine:
            raise ConfigError("mean compensation needs an output projection with a bias; choose least-squares or none")
        shift = weight[:, columns_gone] @ moments.mean[columns_gone]
    return SolvedRefit(weight.index_fill(1, columns_gone, 0.0), shift)


def least_squares(
    weight: Tensor, columns_gone: Tensor, moments: ContextMoments, *, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """The kept columns, and β, refitted to predict the whole output: V = W_K + W_G Aᵀ, A = (Σ_KK + λI)⁻¹ Σ_KG.

    Affine: Σ is the covariance of the inputs, and the shift is W_G (μ_G − Aᵀ μ_K). Linear: Σ is the second moments, and
    there is no shift. Of all V without these columns this one minimises E‖e‖² + λ‖W − V‖².
    """
    if not len(columns_gone):
        return SolvedRefit(weight.clone(), weight.new_zeros(len(weight)))
    mean, damped_second = moments.mean, damp(moments.covariance if affine else moments.second, share=share)
    columns_left = other_columns(weight.shape[1], columns_gone)
    rows = damped_second.matrix[columns_left]  # [m-n m]
    corner, side = rows[:, columns_left], rows[:, columns_gone]
    regression = torch.cholesky_solve(side, torch.linalg.cholesky(corner))  # A [m-n n]
    new_weight = weight.index_fill(1, columns_gone, 0.0)
    new_weight[:, columns_left] += weight[:, columns_gone] @ regression.T
    shift = weight[:, columns_gone] @ (mean[columns_gone] - regression.T @ mean[columns_left])
    shift = shift if affine else torch.zeros_like(shift)
    return SolvedRefit(new_weight, shift, damped_second.damping, damped_second.times_raised)


@dataclass
class PairMoments:
    """Sums over `tokens` of a module's inputs x in the intact model, x̃ in the pruned one, and of targets t, in float64.

    `pruned` Σ x̃ [m], `products` Σ x̃ x̃ᵀ [m m], `target` Σ t [d], `cross` Σ x̃ tᵀ [m d], `target_energy` Σ ‖t‖²,
    `energy` Σ ‖W x‖², `lost_energy` Σ ‖W_G x_G‖² over removed columns. `streams` counts tokens whose targets include
    what the residual stream has lost.
    """

    pruned: Tensor
    products: Tensor
    target: Tensor
    cross: Tensor
    target_energy: float = 0.0
    energy: float = 0.0
    lost_energy: float = 0.0
    tokens: int = 0
    streams: int = 0

    @classmethod
    def zero(cls, m: int, d: int) -> PairMoments:
        zeros = partial(torch.zeros, dtype=torch.float64)
        return cls(zeros(m), zeros(m, m), zeros(d), zeros(m, d))

    def add(self, pruned: Tensor, output: Tensor, removed_output: Tensor, stream: Tensor | None) -> None:
        """Add n tokens: inputs [n m], intact outputs, their part from removed columns, the stream's loss [n d]."""
        target = output if stream is None else output + stream
        self.tokens += len(pruned)
        self.streams += 0 if stream is None else len(pruned)
        self.energy += float(output.square().sum())
        self.lost_energy += float(removed_output.square().sum())
        self.pruned += pruned.sum(dim=0).cpu()
        self.products += (pruned.T @ pruned).cpu()
        self.target += target.sum(dim=0).cpu()
        self.cross += (pruned.T @ target).cpu()
        self.target_energy += float(target.square().sum())


SUMS = ("pruned", "products", "target", "cross", "target_energy", "energy", "lost_energy")


def refit_to_targets(
    weight: Tensor, columns_gone: Tensor, pair: PairMoments, *, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """The kept columns refitted to targets t = y − β, for inputs that earlier removals have changed.

    Vᵀ = (C̃_KK + λI)⁻¹ (R_K + λ W_Kᵀ): damping pulls V to the old W. Affine: C̃ is the covariance of x̃, R that of x̃ and
    t, and the shift is E t − V μ̃_K. Linear: C̃ = E x̃ x̃ᵀ, R = E x̃ tᵀ, and there is no shift.
    """
    sums = (pair.pruned, pair.products, pair.target, pair.cross)
    mean, second, target, cross = (values / pair.tokens for values in sums)
    columns_left = other_columns(weight.shape[1], columns_gone)
    if affine:
        second, cross = second - torch.outer(mean, mean), cross - torch.outer(mean, target)
    damped_second = damp(second, share=share)
    right_side = cross[columns_left] + damped_second.damping * weight[:, columns_left].T  # [m-n d]
    new_weight = torch.zeros_like(weight)
    new_weight[:, columns_left] = torch.cholesky_solve(
        right_side, torch.linalg.cholesky(damped_second.matrix[columns_left][:, columns_left])
    ).T
    shift = target - new_weight @ mean if affine else torch.zeros_like(target)
    return SolvedRefit(new_weight, shift, damped_second.damping, damped_second.times_raised)


def reconstruction_error(weight: Tensor, refit: SolvedRefit, moments: ContextMoments) -> float:
    """E‖y − ŷ‖² over calibration tokens."""
    difference = weight - refit.weight
    mean_error = difference @ moments.mean - refit.shift
    return float(((difference @ moments.covariance) * difference).sum() + mean_error.square().sum())


def other_columns(columns: int, columns_gone: Tensor) -> Tensor:
    """The numbers of the columns that stay, in order."""
    stays = torch.ones(columns, dtype=torch.bool, device=columns_gone.device)
    stays[columns_gone] = False
    return stays.nonzero()[:, 0]
