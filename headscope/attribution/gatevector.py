"""An objective as a function of the gates of all heads.

The vector [b N] has a gate for every head, in the order of `headscope.heads.all_heads`; gate 1 leaves a head
unchanged, gate 0 removes its context (or replaces it).

Over it captum (Kokhlikyan et al. 2020) measures ablation, Shapley values and integrated gradients. Each takes f, which
maps gates [b N] to the objective of every sentence [b], and the open gates (ones [b N]); it returns importances [b N]:
positive where the objective is lower without the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.heads import SITES, Layout, Site
from headscope.model.discovery import find_attention
from headscope.model.gating import gated
from headscope.model.gradients import frozen_parameters
from headscope.model.prefix_cache import LayerIndex, PrefixCache

Keep = Literal["first", "last"]
Contexts = Mapping[tuple[Site, int], list[Tensor]]
"""Contexts [b h t k] of every (site, layer), call by call."""


def split_gates(vector: Tensor, layout: Layout) -> dict[tuple[Site, int], Tensor]:
    """Split values [… N] of all heads, in the order of `all_heads`, into those of every (site, layer) [… h]."""
    layers = sorted(layout, key=lambda layer: (SITES.index(layer[0]), layer[1]))
    return dict(zip(layers, torch.split(vector, [layout[layer] for layer in layers], dim=-1), strict=True))


class GateFunction:
    """f(gates): the objective [b] of a batch under head gates [b N].

    `objective` runs the model on the batch, the same at each call. Gates that are the same for all sentences,
    as captum's perturbations are, reuse a cached pass (`headscope.model.prefix_cache`): layers below the first head
    that differs from that pass are not computed again. `keep` says which pass is cached: the "first" (all heads open;
    later vectors close one), or the "last" (for vectors that differ in one head from the vector before). Gates that
    require gradients, or differ between sentences, take a full pass.
    `sites` are those that `objective` runs (default: all); `layer_index` is the model's, None for full passes only.
    `closed_contexts` maps the contexts of a pass with all heads open to those of closed heads (default: zero).
    """

    def __init__(
        self,
        model: nn.Module,
        objective: Callable[[], Tensor],
        *,
        layer_index: LayerIndex | None,
        keep: Keep = "first",
        sites: frozenset[Site] = frozenset(Site),
        closed_contexts: Callable[[Contexts], Contexts] = lambda contexts: {},
    ) -> None:
        self.model, self.objective, self.keep, self.closed_contexts = model, objective, keep, closed_contexts
        self.layout = {
            layer: heads for layer, heads in find_attention(model).layout.items() if heads and layer[0] in sites
        }
        self.size = sum(self.layout.values())
        self.prefix_cache = PrefixCache(model, objective, layer_index)

    @contextmanager
    def entered(self) -> Iterator[GateFunction]:
        """Within the block the function can be called; it begins with a pass with all heads open."""
        with self.prefix_cache.entered():
            with torch.no_grad():
                self.prefix_cache.value(split_gates(torch.ones(self.size), self.layout), keep=True)
            self.prefix_cache.instead = self.closed_contexts(self.prefix_cache.cached.contexts)
            yield self

    def __call__(self, gates: Tensor) -> Tensor:
        """The objective [b] under gates [b N]; ConfigError where N is not the number of heads."""
        if gates.shape[-1] != self.size:
            raise ConfigError(f"{gates.shape[-1]} gates for a model of {self.size} heads")
        if gates.requires_grad and torch.is_grad_enabled():
            return self._full_pass(gates).to(gates.device)
        with torch.no_grad():
            if not bool((gates == gates[:1]).all()):
                return self._full_pass(gates).to(gates.device)
            by_layer = split_gates(gates[0].detach().cpu(), self.layout)
            return self.prefix_cache.value(by_layer, keep=self.keep == "last").to(gates.device)

    def _full_pass(self, gates: Tensor) -> Tensor:
        if self.prefix_cache.instead:
            raise ConfigError("closed heads that give something else take gates that are the same for all sentences")
        with frozen_parameters(self.model), gated(self.model, split_gates(gates, self.layout)):
            return self.objective()


Gated = Callable[[Tensor], Tensor]


def ablation(f: Gated, gates: Tensor) -> Tensor:
    """f(all heads) − f(all but this one) for every head, one evaluation each: captum's FeatureAblation."""
    from captum.attr import FeatureAblation

    importances: Tensor = FeatureAblation(f).attribute(gates, baselines=0)
    return importances


def shapley(f: Gated, gates: Tensor, *, samples: int, seed: int) -> Tensor:
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


def integrated_gradients(f: Gated, gates: Tensor, *, steps: int) -> tuple[Tensor, Tensor]:
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
