"""Captum over a vector of head gates: ablation, Shapley values, integrated gradients.

Each takes f, which maps gates [b N] to the objective of every sentence [b], and the open gates (ones [b N]); it returns
importances [b N]: positive where the objective is lower without the head. Captum (Kokhlikyan et al. 2020) is
imported at the first call.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from headscope.errors import ConfigError

Objective = Callable[[Tensor], Tensor]


def ablation(f: Objective, gates: Tensor) -> Tensor:
    """f(all heads) − f(all but this one) for every head, one evaluation each: captum's FeatureAblation."""
    from captum.attr import FeatureAblation

    importances: Tensor = FeatureAblation(f).attribute(gates, baselines=0)
    return importances


def shapley(f: Objective, gates: Tensor, *, samples: int, seed: int) -> Tensor:
    """Shapley values estimated from `samples` random orders (Castro et al. 2009): captum's ShapleyValueSampling.

    A head's value is the mean of f(the heads before it and it) − f(the heads before it). In every order these add
    up to f(all) − f(none), so their means do, whatever the number of samples. The orders follow from the seed and
    are the same for all sentences. Captum sums in float32. ConfigError for fewer than one sample.
    """
    from captum.attr import ShapleyValueSampling

    if samples < 1:
        raise ConfigError(f"--shapley-samples {samples}: at least 1 random order is needed")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        importances: Tensor = ShapleyValueSampling(f).attribute(gates, baselines=0, n_samples=samples)
    return importances


def integrated_gradients(f: Objective, gates: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
    """∫ ∂f/∂gate along the line from all gates 0 to all gates 1 (Sundararajan et al. 2017, §3), and its gap [b].

    Captum's IntegratedGradients with `steps` points of Gauss and Legendre, one forward and backward pass each. The
    gap is Σ values − (f(all) − f(none)), 0 for the exact integral. ConfigError for fewer than
    one step.
    """
    from captum.attr import IntegratedGradients

    if steps < 1:
        raise ConfigError(f"--ig-steps {steps}: at least 1 step is needed")
    with torch.enable_grad():
        importances, gap = IntegratedGradients(f).attribute(
            gates, baselines=0, n_steps=steps, internal_batch_size=len(gates), return_convergence_delta=True
        )
    return importances.detach(), gap.detach()
