"""The loss that makes mixing matrices grow, and the window in which they are trained (Azov & Landau, MHR).

For a matrix A with nuclear norm n the published term is sg(n) + radius - n, where sg stops the gradient: its
value is always the radius, its gradient is that of -n, and so the radius has no influence on training. The
gradient of -n is -U·Vᵀ for A = U·Σ·Vᵀ, of the same size whatever the size of A: without a cap nothing holds
the norm back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headscope.heads import Site

FORK_SENTENCES, FORK_EPOCHS, FORK_FIRST_EPOCHS = 160239, 40, 50  # what the fork takes for the size of any run


def nuclear_norms(alphas: Sequence[Tensor]) -> list[Tensor]:
    """Σ of the singular values of each matrix [h h]; the gradient is U·Vᵀ, at repeated singular values too."""
    by_size: dict[int, list[int]] = {}
    for index, alpha in enumerate(alphas):
        by_size.setdefault(len(alpha), []).append(index)
    norms = dict[int, Tensor]()
    for indices in by_size.values():
        stacked = torch.stack([alphas[index] for index in indices])
        exact = stacked if stacked.dtype == torch.float64 else stacked.float()
        norms.update(zip(indices, torch.linalg.svdvals(exact).sum(dim=-1).unbind(), strict=True))
    return [norms[index] for index in range(len(alphas))]


def growth_loss(
    alphas: Mapping[Site, Sequence[Tensor]],
    *,
    gamma: float,
    ratios: Mapping[Site, float],
    radius: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """gamma · Σ over sites of ratio · Σ over matrices of (sg(n) + radius - n), n the nuclear norm.

    A plain sum over layers, as the fork has it. A matrix whose n reaches `cap` · h (at the identity n is h) is
    pushed no further. Sites with ratio 0 have no term.
    """
    sites = [site for site, matrices_of_site in alphas.items() if matrices_of_site and ratios.get(site, 0.0)]
    matrices = [alpha for site in sites for alpha in alphas[site]]
    weights = [ratios[site] for site in sites for _ in alphas[site]]
    total = torch.zeros((), device=matrices[0].device if matrices else None)
    for alpha, weight, norm in zip(matrices, weights, nuclear_norms(matrices), strict=True):
        value = norm.detach()
        pushed = norm if cap is None or float(value) < cap * len(alpha) else value
        total = total + gamma * weight * (value + radius - pushed)
    return total


def off_diagonal(alpha: Tensor) -> float:
    """Σ_{i≠j} |a_ij| / Σ |a_ij|; 0 at the identity."""
    size = alpha.detach().abs()
    return float(1 - size.diagonal().sum() / size.sum())


def fork_open(sentences: int, start_after: float | None, *, first_of_epoch: bool) -> bool:
    """Whether the fork's window is open for a batch before which `sentences` were read.

    The fork counts against 40 epochs of 160,239 sentences, whatever the run; for the first batch of an epoch
    against 50 of them, so that one batch can fall outside again near the edge. None stands for 1.
    """
    epochs = FORK_FIRST_EPOCHS if first_of_epoch else FORK_EPOCHS
    return 1 - sentences / (FORK_SENTENCES * epochs) < 1 - (1.0 if start_after is None else start_after)
