"""What is put in the place of removed columns of a linear layer: nothing, their mean, or a refit of the others.

The layer is y = W x + β with W [d m]. Some columns G of W are removed; what makes up for them are new values of the
others, and a shift of β where the layer has one. Moments are means over calibration tokens: of x [m] and x xᵀ [m m].
All in float64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.pruning.closed_form.block_obs import damp, weigh
from headscope.pruning.options.refit import DAMPING


@dataclass(frozen=True)
class SolvedRefit:
    """W [d m] with zeros in the removed columns, what is added to β [d], λ, and how often λ was raised tenfold."""

    weight: Tensor
    shift: Tensor
    damping: float = 0.0
    raised: int = 0


class Compensation(Protocol):
    """Makes up for removed columns [n] of `weight` [d m], given the mean [m] and second moments [m m] of inputs.

    `affine`: β may be shifted.
    """

    def __call__(
        self, weight: Tensor, removed: Tensor, *, mean: Tensor, second: Tensor, affine: bool, share: float = DAMPING
    ) -> SolvedRefit:
        """ConfigError where the compensation needs what `affine` does not allow."""
        ...


def zeroed(
    weight: Tensor, removed: Tensor, *, mean: Tensor, second: Tensor, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """Nothing makes up for the columns."""
    return SolvedRefit(weight.index_fill(1, removed, 0.0), weight.new_zeros(len(weight)))


def mean_shifted(
    weight: Tensor, removed: Tensor, *, mean: Tensor, second: Tensor, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """β takes over what the columns give on the mean: W_G μ_G. ConfigError where there is no β."""
    if not affine:
        raise ConfigError("mean compensation needs an output projection with a bias; choose least-squares or none")
    return SolvedRefit(weight.index_fill(1, removed, 0.0), weight[:, removed] @ mean[removed])


def least_squares(
    weight: Tensor, removed: Tensor, *, mean: Tensor, second: Tensor, affine: bool, share: float = DAMPING
) -> SolvedRefit:
    """The other columns and β take over what they can: V = W_K + W_G Aᵀ, A = (Σ_KK + λI)⁻¹ Σ_KG.

    Affine: Σ is the covariance of the inputs, the shift W_G (μ_G − Aᵀ μ_K). Linear: Σ are the second moments and
    nothing is shifted. Among all W without these columns it has the least E‖e‖² + λ‖W − V‖². Nothing removed is
    nothing changed.
    """
    if not len(removed):
        return SolvedRefit(weight.clone(), weight.new_zeros(len(weight)))
    damped = damp(second - torch.outer(mean, mean) if affine else second, share=share)
    kept = others(weight.shape[1], removed)
    corner, side = damped.matrix[kept][:, kept], damped.matrix[kept][:, removed]
    predicts = torch.cholesky_solve(side, torch.linalg.cholesky(corner))  # A [m-n n]
    refitted = weight.index_fill(1, removed, 0.0)
    refitted[:, kept] += weight[:, removed] @ predicts.T
    shift = weight[:, removed] @ (mean[removed] - predicts.T @ mean[kept]) if affine else weight.new_zeros(len(weight))
    return SolvedRefit(refitted, shift, damped.damping, damped.raised)


COMPENSATIONS: Mapping[str, Compensation] = {"none": zeroed, "mean": mean_shifted, "least-squares": least_squares}


def refit_to_targets(
    weight: Tensor,
    removed: Tensor,
    *,
    mean: Tensor,
    second: Tensor,
    target: Tensor,
    cross: Tensor,
    affine: bool,
    share: float = DAMPING,
) -> SolvedRefit:
    """The kept columns that come nearest to given outputs, for inputs that earlier removals have changed.

    `mean` [m] and `second` [m m] are of the inputs x̃ of the pruned model; `target` [d] is the mean of the outputs
    y − β of the intact one, `cross` [m d] that of x̃ (y − β)ᵀ. V = (C̃_KK + λI)⁻¹ (R_K + λ W_Kᵀ), so that damping
    pulls to the old W, and the shift is E[y − β] − V μ̃_K; linear without centring and shift.
    """
    kept = others(weight.shape[1], removed)
    if affine:
        second, cross = second - torch.outer(mean, mean), cross - torch.outer(mean, target)
    damped = damp(second, share=share)
    wanted = cross[kept] + damped.damping * weight[:, kept].T  # [m-n d]
    refitted = torch.zeros_like(weight)
    refitted[:, kept] = torch.cholesky_solve(wanted, torch.linalg.cholesky(damped.matrix[kept][:, kept])).T
    shift = target - refitted @ mean if affine else torch.zeros_like(target)
    return SolvedRefit(refitted, shift, damped.damping, damped.raised)


def reconstruction_error(
    weight: Tensor, refit: SolvedRefit, *, mean: Tensor, second: Tensor, fisher: Tensor | None = None
) -> float:
    """E[eᵀ F e] of e = y − ŷ over calibration tokens; F [d d] is the identity where there is none."""
    lost, shift = weight - refit.weight, refit.shift
    if fisher is not None:
        both = weigh(torch.cat([lost, shift[:, None]], dim=1), fisher)
        lost, shift = both[:, :-1], both[:, -1]
    centred = second - torch.outer(mean, mean)
    return float(((lost @ centred) * lost).sum() + (lost @ mean - shift).square().sum())


def others(columns: int, removed: Tensor) -> Tensor:
    """The columns that stay, in their order."""
    stays = torch.ones(columns, dtype=torch.bool, device=removed.device)
    stays[removed] = False
    return stays.nonzero()[:, 0]
