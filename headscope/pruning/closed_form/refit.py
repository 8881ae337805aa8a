"""Replacements of removed columns of a linear layer (zeros, their mean, a refit of the others) and their error.

The cost is optimal brain surgeon's, over blocks of columns. A linear layer y = W x [d m] is approximated without some
blocks of x's entries, with second moments H = E[x xᵀ] [m m] of its inputs and P = H⁻¹ (Hassibi and Stork 1993; blocks
as in Frantar and Alistarh 2022, §4). All sums are over tokens divided by their number, in float64. An error that is
weighted by the Fisher matrix F [d d] of y, E[eᵀ F e], is the plain one of F^½ W (`weigh`): F does not change which W is
best, only what a block costs. What makes up for removed columns G are new values of the others, and a shift of the
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
"""A pivot of at most this share of the largest second moment is taken for a rounding error."""
SMALLEST = 1e-200
"""A mean second moment below this is none."""


@dataclass(frozen=True)
class Damped:
    """H + λI [m m], its lower Cholesky factor, λ, and how often λ was raised tenfold until there was one."""

    matrix: Tensor
    factor: Tensor
    damping: float
    times_raised: int = 0

    def inverse(self) -> Tensor:
        """(H + λI)⁻¹ [m m]."""
        return torch.cholesky_inverse(self.factor)


class RemovalStep(NamedTuple):
    """The block that goes next, and by how much the error grows then."""

    block: int
    error: float


def damp(second: Tensor, *, share: float = DAMPING) -> Damped:
    """H + λI for second moments H [m m], λ = `share` of H's mean diagonal, ten times more until it can be factorised.

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
    """F^½ W [d m], up to a rotation of its rows, which no error depends on; F [d d] may be singular."""
    values, vectors = torch.linalg.eigh((fisher + fisher.T) / 2)  # [d], [d d]
    return values.clamp(min=0).sqrt()[:, None] * (vectors.T @ weight)


def block_errors(weight: Tensor, inverse: Tensor, blocks: Tensor) -> Tensor:
    """ε_g = tr(W_g [P_gg]⁻¹ W_gᵀ) [u]: the growth of E‖e‖² when block g goes and the rest is refitted.

    `blocks` [u n] has the columns of each of u blocks, none of them removed before.
    """
    parts = weight[:, blocks].permute(1, 2, 0)  # [u n d]
    corners = inverse[blocks[:, :, None], blocks[:, None, :]]  # [u n n]
    # one by one: torch 2.13 with MKL fails on several matrices at once, of 160 rows or more, after set_num_threads
    solution = torch.stack([torch.linalg.solve(corner, part) for corner, part in zip(corners, parts, strict=True)])
    return (parts * solution).sum(dim=(1, 2)).clamp(min=0)


def remove_block(weight: Tensor, inverse: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    """W [d m] and P [m m] without some columns [n]: the others of W refitted, P that of the inputs that are left.

    Both keep their shapes, with zeros where the columns were.
    """
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
    """Blocks in the order in which they go, the cheapest first, each judged with those before it gone.

    Only `candidates` go (None: all of the `blocks` [u n]). The errors add up to that of removing them together.
    """
    blocks_left = sorted(range(len(blocks)) if candidates is None else candidates)
    steps = []
    while blocks_left:
        errors = block_errors(weight, inverse, blocks[blocks_left])
        best = int(errors.argmin())
        block = blocks_left.pop(best)
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


def interpolate(nothing: SolvedRefit, refit: SolvedRefit, strength: float) -> SolvedRefit:
    """A share of the way from the columns that stay, as they were, to a refit, which is itself at 1."""
    if strength == 1:
        return refit
    weight, shift = (torch.lerp(getattr(nothing, name), getattr(refit, name), strength) for name in ("weight", "shift"))
    return replace(refit, weight=weight, shift=shift)


def compensation(
    method: str, weight: Tensor, columns_gone: Tensor, moments: ContextMoments, *, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """The refit for removed columns [n] of `weight` [d m], given the moments of inputs [m].

    "none": nothing; "mean": β takes over what the columns give on the mean, W_G μ_G; else `least_squares`. `affine`: β
    may be shifted. ConfigError for a mean without β.
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
    """The other columns and β take over what they can: V = W_K + W_G Aᵀ, A = (Σ_KK + λI)⁻¹ Σ_KG.

    Affine: Σ is the covariance of the inputs, the shift W_G (μ_G − Aᵀ μ_K). Linear: Σ are the second moments and
    nothing is shifted. Among all W without these columns it has the least E‖e‖² + λ‖W − V‖². Nothing removed is
    nothing changed.
    """
    if not len(columns_gone):
        return SolvedRefit(weight.clone(), weight.new_zeros(len(weight)))
    mean, damped_second = moments.mean, damp(moments.covariance if affine else moments.second, share=share)
    columns_left = other_columns(weight.shape[1], columns_gone)
    rows = damped_second.matrix[columns_left]  # [m-n m]
    corner, side = rows[:, columns_left], rows[:, columns_gone]
    predicts = torch.cholesky_solve(side, torch.linalg.cholesky(corner))  # A [m-n n]
    new_weight = weight.index_fill(1, columns_gone, 0.0)
    new_weight[:, columns_left] += weight[:, columns_gone] @ predicts.T
    shift = weight[:, columns_gone] @ (mean[columns_gone] - predicts.T @ mean[columns_left])
    shift = shift if affine else torch.zeros_like(shift)
    return SolvedRefit(new_weight, shift, damped_second.damping, damped_second.times_raised)


@dataclass
class PairMoments:
    """Sums over `tokens` of inputs x of the intact model, x̃ of the pruned one and of targets t, in float64.

    `pruned` Σ x̃ [m], `products` Σ x̃ x̃ᵀ [m m], `target` Σ t [d], `cross` Σ x̃ tᵀ [m d], `target_energy` Σ ‖t‖²,
    `energy` Σ ‖W x‖², `lost_energy` Σ ‖W_G x_G‖² over removed columns. `streams`: tokens whose targets count the
    residual stream in.
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
        """Inputs [n m], intact outputs and what of them removed columns give [n d], and what the stream lost [n d]."""
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
    """The kept columns that come nearest to given outputs t = y − β, for inputs that earlier removals have changed.

    V = (C̃_KK + λI)⁻¹ (R_K + λ W_Kᵀ) with R = E x̃ tᵀ, so that damping pulls to the old W, and the shift is
    E t − V μ̃_K; linear without centring and shift.
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
    weight_lost = weight - refit.weight
    error_of_mean = weight_lost @ moments.mean - refit.shift
    return float(((weight_lost @ moments.covariance) * weight_lost).sum() + error_of_mean.square().sum())


def other_columns(columns: int, columns_gone: Tensor) -> Tensor:
    """The columns that stay, in their order."""
    stays = torch.ones(columns, dtype=torch.bool, device=columns_gone.device)
    stays[columns_gone] = False
    return stays.nonzero()[:, 0]
