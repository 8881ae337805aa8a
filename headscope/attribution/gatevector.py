"""An objective as a function of the gates of all heads.

The vector [b N] has a gate for every head, in the order of `headscope.heads.all_heads`; gate 1 leaves a head
unchanged, gate 0 removes its context (or replaces it).

Over it captum (Kokhlikyan et al. 2020) measures ablation, Shapley values and integrated gradients. Each takes f, which
maps gates [b N] to the objective of every sentence [b], and the open gates (ones [b N]); it returns importances [b N]:
positive where the objective is lower without the head.

Over the sentences of one batch it is attributed to the gates by captum. The context of a closed head is zero, its mean
over the sentence, or its context at another position. Each replacement depends on one sentence only, so a batch of N
sentences is N batches of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Literal

import torch
from torch import Tensor, nn

from headscope.attribution.objectives.base import Objective, ObjectiveOutput
from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, Layout, Site
from headscope.model.discovery import find_attention
from headscope.model.prefix_cache import LayerIndex, PrefixCache
from headscope.model.taps import frozen_parameters, gated

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
    def activate(self) -> Iterator[GateFunction]:
        """Within the block the function can be called; it begins with a pass with all heads open."""
        with self.prefix_cache.activate():
            with torch.no_grad():
                self.prefix_cache.value(split_gates(torch.ones(self.size), self.layout), keep=True)
            self.prefix_cache.instead = self.closed_contexts(self.prefix_cache.prefix.contexts)
            yield self

    def __call__(self, gates: Tensor) -> Tensor:
        """The objective [b] under gates [b N]."""
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
Tick = Callable[[float], None]
"""Called with the share of the evaluations that are done."""


def _ticking(f: Gated, evaluations: int, tick: Tick) -> Gated:
    """f, which tells `tick` after each evaluation how many of them are done."""
    numbers = count(1)

    def evaluate(gates: Tensor) -> Tensor:
        value = f(gates)
        tick(min(next(numbers) / evaluations, 1))
        return value

    return evaluate


def ablation(f: Gated, gates: Tensor, *, tick: Tick = lambda share: None) -> Tensor:
    """f(all heads) − f(all but this one) for every head, one evaluation each: captum's FeatureAblation."""
    from captum.attr import FeatureAblation

    f = _ticking(f, gates.shape[1] + 1, tick)
    return FeatureAblation(f).attribute(gates, baselines=0)


def shapley(f: Gated, gates: Tensor, *, samples: int, seed: int, tick: Tick = lambda share: None) -> Tensor:
    """Shapley values estimated from `samples` random orders (Castro et al. 2009): captum's ShapleyValueSampling.

    A head's value is the mean of f(the heads before it and it) − f(the heads before it). In every order these add
    up to f(all) − f(none), so their means do, whatever the number of samples. The orders follow from the seed and
    are the same for all sentences. Captum sums in float32.
    """
    from captum.attr import ShapleyValueSampling

    f = _ticking(f, samples * gates.shape[1] + 1, tick)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        importances: Tensor = ShapleyValueSampling(f).attribute(gates, baselines=0, n_samples=samples)
    return importances


def integrated_gradients(
    f: Gated, gates: Tensor, *, steps: int, tick: Tick = lambda share: None
) -> tuple[Tensor, Tensor]:
    """∫ ∂f/∂gate along the line from all gates 0 to all gates 1 (Sundararajan et al. 2017, §3), and its gap [b].

    Captum's IntegratedGradients with `steps` points of Gauss and Legendre, one forward and backward pass each. The
    gap is Σ values − (f(all) − f(none)), 0 for the exact integral.
    """
    from captum.attr import IntegratedGradients

    f = _ticking(f, steps + 2, tick)
    with torch.enable_grad():
        importances, gap = IntegratedGradients(f).attribute(
            gates, baselines=0, n_steps=steps, internal_batch_size=len(gates), return_convergence_delta=True
        )
    return importances.detach(), gap.detach()


def mean_context(context: Tensor, real: Tensor) -> Tensor:
    """Mean over the sentence's own real positions [b t], special ones too: [b h 1 k] from contexts [b h t k]."""
    weights = real.to(context.dtype)
    total = torch.einsum("bhtk,bt->bhk", context, weights)
    return (total / weights.sum(dim=-1)[:, None, None])[:, :, None]


def other_context(context: Tensor, real: Tensor, shifts: Tensor) -> Tensor:
    """Contexts [b h t k] rolled by `shifts` [b] over each sentence's real positions; what padding gets is arbitrary."""
    lengths = real.sum(dim=-1, keepdim=True)  # [b 1]
    order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)  # real positions first
    rank = (real.cumsum(dim=-1) - 1).clamp(min=0)
    donor = order.gather(1, (rank + shifts[:, None]) % lengths.clamp(min=1))  # [b t]
    return context.gather(2, donor[:, None, :, None].expand_as(context))


def random_shifts(indices: Tensor, lengths: Tensor, *, seed: int) -> Tensor:
    """For each sentence number a shift from 1 to its length minus 1 (0 where there is one position): [b].

    A hash of number and seed (the finaliser of MurmurHash3), so that the shift does not depend on the batch.
    """
    mask = 0xFFFFFFFF
    hashes = (indices * 0x9E3779B1 + seed * 0x85EBCA77 + 1) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = ((hashes ^ (hashes >> shift)) * factor) & mask
    hashes = hashes ^ (hashes >> 16)
    return torch.where(lengths > 1, 1 + hashes.to(lengths.device) % (lengths - 1).clamp(min=1), 0)


def means(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """The mean of the head's contexts over the sentence, the same at every position.

    Wang et al. (2022) take the mean over a data set; here it is over the sentence's own positions.
    """
    return {
        layer: [mean_context(context, _real(layer, batch)) for context in calls] for layer, calls in contexts.items()
    }


def shift_contexts(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """At each position the head's context at another position of the same sentence.

    All heads of a sentence are shifted by the same number of positions, which follows from the seed and the
    sentence's number. A sentence of one position stays unchanged.
    """
    shifts: dict[int, Tensor] = {}
    replacements = {}
    for layer, calls in contexts.items():
        real = _real(layer, batch)
        if id(real) not in shifts:
            shifts[id(real)] = random_shifts(batch.indices, real.sum(dim=-1), seed=seed)
        replacements[layer] = [other_context(context, real, shifts[id(real)]) for context in calls]
    return replacements


REPLACEMENTS: Mapping[str, Callable[[Contexts, Batch, int], Contexts]] = {
    "zero": lambda contexts, batch, seed: {},  # the head's gate is closed (Voita et al. 2019; Michel et al. 2019)
    "mean": means,
    "resample": shift_contexts,
}


def _real(layer: tuple[Site, int], batch: Batch) -> Tensor:
    """Which query positions of a site are not padding [b t]."""
    return batch.sides(layer[0])[0].real


Of = Literal["damage", "value"]


@dataclass
class GatedObjective:
    """The value of an objective on a prepared batch under the gates that are set; the first call is the intact model's.

    Higher is better. "damage": minus the objective's damage, 0 where no gate is closed. "value": the objective's
    value with the intact pass's aim, minus it where lower is better; the two differ by a constant but for
    `representation`, whose damage is a cosine distance and whose value is a projection.
    """

    checkpoint: Checkpoint
    objective: Objective
    batch: Batch
    of: Of
    intact: ObjectiveOutput | None = None

    def __call__(self) -> Tensor:
        """One forward pass: [b]."""
        aim = None if self.intact is None else self.intact.aim
        output = self.objective.output(self.checkpoint, self.batch)
        outcome = self.objective.evaluate(self.checkpoint, output, self.batch, aim)
        if self.intact is None:
            self.intact = outcome
        if self.of == "damage":
            return -self.objective.damage(self.intact, outcome)
        return outcome.values if self.objective.higher_is_better else -outcome.values


@dataclass(frozen=True)
class ExplainedBatch:
    """f(gates) of a batch, its open gates [b N], and the counts that importances [b N] are divided by."""

    f: GateFunction
    gates: Tensor
    counts: Tensor
    layout: Layout

    def ratios(self, name: str, importances: Tensor) -> dict[tuple[str, Site, int], Ratio]:
        """Sums and counts of a statistic at every (site, layer)."""
        return {
            (name, site, layer): Ratio(part, self.counts[:, None])
            for (site, layer), part in split_gates(importances, self.layout).items()
        }


@contextmanager
def explained_batch(
    checkpoint: Checkpoint,
    objective: Objective,
    batch: Batch,
    *,
    layer_index: LayerIndex | None,
    of: Of = "damage",
    keep: Keep = "first",
    ablate_with: str = "zero",
    other_contexts: Contexts | None = None,
) -> Iterator[ExplainedBatch]:
    """Within the block: the objective of every sentence of a batch as a function of head gates.

    A closed head's context is replaced as `ablate_with` says (see `headscope.attribution.gatevector`), or by that of
    `other_contexts`, which has the contexts of another run over as many positions.
    """
    gated_objective = GatedObjective(checkpoint, objective, objective.prepare(checkpoint, batch), of)

    def closed_contexts(contexts: Contexts) -> Contexts:
        return REPLACEMENTS[ablate_with](contexts, batch, objective.seed) if other_contexts is None else other_contexts

    encoder_only = checkpoint.two_sided and batch.target is None
    sites = frozenset({Site.ENCODER_SELF}) if encoder_only else frozenset(Site)
    f = GateFunction(
        checkpoint.model,
        gated_objective,
        layer_index=layer_index,
        keep=keep,
        sites=sites,
        closed_contexts=closed_contexts,
    )
    with f.activate():
        assert gated_objective.intact is not None
        dtype = torch.float64 if checkpoint.dtype is torch.float64 else torch.float32
        yield ExplainedBatch(
            f, torch.ones(len(batch.indices), f.size, dtype=dtype), gated_objective.intact.counts.cpu(), f.layout
        )
