"""An objective as a function of the gates of all heads, and importances of heads from it.

The vector [b N] has a gate for each of N heads, in the order of `headscope.heads.all_heads`; gate 1 leaves a head
unchanged, gate 0 replaces its context: by zero, its mean over the sentence, or its context at another position. The
replacement depends on the sentence alone, so results do not depend on the batch.

Captum (Kokhlikyan et al. 2020) computes ablation, Shapley values and integrated gradients. Each takes f, which maps
gates [b N] to the objective of every sentence [b], and open gates (ones [b N]); it returns importances [b N], positive
where the objective is lower without the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from headscope.attribution.objectives.base import Objective, ObjectiveOutput
from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import SITES, HeadId, Layout, Site, SiteLayer, all_heads
from headscope.model.prefix_cache import LayerIndex, PrefixCache
from headscope.model.taps import frozen_parameters, gated

Keep = Literal["first", "last"]
Contexts = Mapping[SiteLayer, list[Tensor]]
"""Contexts [b h t k] of every (site, layer), call by call."""


def split_gates(vector: Tensor, layout: Layout) -> dict[SiteLayer, Tensor]:
    """Split values [… N] of all heads, in the order of `all_heads`, by (site, layer) [… h]."""
    layers = sorted(layout, key=lambda layer: (SITES.index(layer[0]), layer[1]))
    return dict(zip(layers, torch.split(vector, [layout[layer] for layer in layers], dim=-1), strict=True))


GatedObjective = Callable[[Tensor], Tensor]
Tick = Callable[[float], None]
"""Called with the share of the evaluations that are done."""


def _with_progress(f: GatedObjective, evaluations: int, tick: Tick) -> GatedObjective:
    """f, which calls `tick` after each evaluation with the share that is done."""
    numbers = count(1)

    def evaluate(gates: Tensor) -> Tensor:
        value = f(gates)
        tick(min(next(numbers) / evaluations, 1))
        return value

    return evaluate


def ablation(f: GatedObjective, gates: Tensor, *, tick: Tick = lambda share: None) -> Tensor:
    """f(all heads) − f(all but this one) for every head, one evaluation each: captum's FeatureAblation."""
    from captum.attr import FeatureAblation

    f = _with_progress(f, gates.shape[1] + 1, tick)
    return FeatureAblation(f).attribute(gates, baselines=0)


def shapley(f: GatedObjective, gates: Tensor, *, samples: int, seed: int, tick: Tick = lambda share: None) -> Tensor:
    """Shapley values estimated from `samples` random orders (Castro et al. 2009): captum's ShapleyValueSampling.

    A head's value is the mean of f(the heads before it and it) − f(the heads before it). In every order these add
    up to f(all) − f(none), so their means do, whatever the number of samples. The orders follow from the seed and
    are the same for all sentences. Captum sums in float32.
    """
    from captum.attr import ShapleyValueSampling

    f = _with_progress(f, samples * gates.shape[1] + 1, tick)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        importances: Tensor = ShapleyValueSampling(f).attribute(gates, baselines=0, n_samples=samples)
    return importances


def integrated_gradients(
    f: GatedObjective, gates: Tensor, *, steps: int, tick: Tick = lambda share: None
) -> tuple[Tensor, Tensor]:
    """∫ ∂f/∂gate along the line from all gates 0 to all gates 1 (Sundararajan et al. 2017, §3), and its gap [b].

    Captum's IntegratedGradients with `steps` points of Gauss and Legendre, one forward and backward pass each. The
    gap is Σ values − (f(all) − f(none)), 0 for the exact integral.
    """
    from captum.attr import IntegratedGradients

    f = _with_progress(f, steps + 2, tick)
    with torch.enable_grad():
        importances, gap = IntegratedGradients(f).attribute(
            gates, baselines=0, n_steps=steps, internal_batch_size=len(gates), return_convergence_delta=True
        )
    return importances.detach(), gap.detach()


def mean_context(context: Tensor, real: Tensor) -> Tensor:
    """The mean [b h 1 k] of contexts [b h t k] over the sentence's positions that are no padding (`real` [b t])."""
    weights = real.to(context.dtype)
    total = torch.einsum("bhtk,bt->bhk", context, weights)
    return (total / weights.sum(dim=-1)[:, None, None])[:, :, None]


def other_context(context: Tensor, real: Tensor, shifts: Tensor) -> Tensor:
    """Contexts [b h t k] rolled by `shifts` [b] over each sentence's `real` positions [b t]; arbitrary at padding."""
    lengths = real.sum(dim=-1, keepdim=True)  # [b 1]
    order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)  # real positions first
    rank = (real.cumsum(dim=-1) - 1).clamp(min=0)
    donor = order.gather(1, (rank + shifts[:, None]) % lengths.clamp(min=1))  # [b t]
    return context.gather(2, donor[:, None, :, None].expand_as(context))


def random_shifts(indices: Tensor, lengths: Tensor, *, seed: int) -> Tensor:
    """A shift [b] of each sentence from 1 to its length minus 1, or 0 if it has one position.

    It is a hash of sentence number and seed (the finaliser of MurmurHash3), so it does not depend on the batch.
    """
    mask = 0xFFFFFFFF
    offset = (seed * 0x85EBCA77 + 1) & mask  # a Python integer: a product with a large seed has more than 64 bits
    hashes = (indices * 0x9E3779B1 + offset) & mask
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        hashes = ((hashes ^ (hashes >> shift)) * factor) & mask
    hashes = hashes ^ (hashes >> 16)
    return torch.where(lengths > 1, 1 + hashes.to(lengths.device) % (lengths - 1).clamp(min=1), 0)


def average_contexts(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """The mean of each head's contexts over the sentence, the same at every position.

    Wang et al. (2022) use the mean over a data set instead.
    """
    return {
        (site, layer): [mean_context(context, batch.sides(site)[0].real) for context in calls]
        for (site, layer), calls in contexts.items()
    }


def shift_contexts(contexts: Contexts, batch: Batch, seed: int) -> Contexts:
    """Each head's context at another position of the same sentence.

    All heads of a sentence are shifted by the same number of positions (`random_shifts`). A sentence of one position
    stays unchanged.
    """
    shifts: dict[int, Tensor] = {}
    replacements = {}
    for layer, calls in contexts.items():
        real = batch.sides(layer[0])[0].real
        if id(real) not in shifts:
            shifts[id(real)] = random_shifts(batch.indices, real.sum(dim=-1), seed=seed)
        replacements[layer] = [other_context(context, real, shifts[id(real)]) for context in calls]
    return replacements


REPLACEMENTS: Mapping[str, Callable[[Contexts, Batch, int], Contexts]] = {
    "zero": lambda contexts, batch, seed: {},  # the head's gate is closed (Voita et al. 2019; Michel et al. 2019)
    "mean": average_contexts,
    "resample": shift_contexts,
}


Of = Literal["damage", "value"]


class GatedBatch:
    """f(gates): the objective [b] of a batch under head gates [b N]; higher is better.

    `of` "damage" is minus the objective's damage, 0 where no gate is closed. "value" is the objective's value with the
    aim of the intact pass, negated where lower is better. The two differ by a constant, except for `representation`,
    whose damage is a cosine distance and whose value is a projection.

    If gates are the same for all sentences, as captum's are, a cached pass is reused
    (`headscope.model.prefix_cache`): layers below the first head that differs from that pass are not computed again.
    `keep` says which pass is cached: the "first" (all heads open; later vectors close one), or the "last" (for vectors
    that differ in one head from the vector before). Gates that require gradients, or differ between sentences, need a
    full pass; without a `layer_index` all do.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        objective: Objective,
        batch: Batch,
        *,
        layer_index: LayerIndex | None,
        of: Of,
        keep: Keep,
    ) -> None:
        self.checkpoint, self.objective, self.of, self.keep = checkpoint, objective, of, keep
        self.batch = objective.prepare(checkpoint, batch)
        sites = {Site.ENCODER_SELF} if checkpoint.two_sided and batch.target is None else {*Site}
        self.layout = {layer: heads for layer, heads in checkpoint.layout.items() if heads and layer[0] in sites}
        self.cache = PrefixCache(checkpoint.model, self._value, layer_index)
        self.intact: ObjectiveOutput | None = None

    def __call__(self, gates: Tensor) -> Tensor:
        needs_gradient = gates.requires_grad and torch.is_grad_enabled()
        with torch.set_grad_enabled(needs_gradient):
            if not needs_gradient and bool((gates == gates[:1]).all()):
                by_layer = split_gates(gates[0].detach().cpu(), self.layout)
                return self.cache.value(by_layer, keep=self.keep == "last").to(gates.device)
            if self.cache.instead:
                raise ConfigError(
                    "closed heads give something else only under gates that are the same for all sentences"
                )
            model = self.checkpoint.model
            with frozen_parameters(model), gated(model, split_gates(gates, self.layout)):
                return self._value().to(gates.device)

    def _value(self) -> Tensor:
        """The objective [b] in a forward pass with the gates that are active; the first pass is the intact model's."""
        aim = None if self.intact is None else self.intact.aim
        output = self.objective.output(self.checkpoint, self.batch)
        outcome = self.objective.evaluate(self.checkpoint, output, self.batch, aim)
        if self.intact is None:
            self.intact = outcome
        if self.of == "damage":
            return -self.objective.damage(self.intact, outcome)
        return outcome.values if self.objective.higher_is_better else -outcome.values

    @property
    def gates(self) -> Tensor:
        """Open gates of all heads [b N]."""
        dtype = torch.float64 if self.checkpoint.dtype is torch.float64 else torch.float32
        return torch.ones(len(self.batch.indices), sum(self.layout.values()), dtype=dtype)

    def gates_without(self, heads: Iterable[HeadId]) -> Tensor:
        """Gates [b N], 0 for `heads` and 1 for the others."""
        gates, columns = self.gates, {head: column for column, head in enumerate(all_heads(self.layout))}
        gates[:, [columns[head] for head in heads]] = 0
        return gates

    @property
    def counts(self) -> Tensor:
        """The counts [b] by which importances [b N] are divided."""
        assert self.intact is not None, "the intact model has run"
        return self.intact.counts.cpu()

    def ratios(self, name: str, importances: Tensor) -> dict[tuple[str, Site, int], Ratio]:
        """The importances [b N] and their counts as a statistic `name` of every (site, layer)."""
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
) -> Iterator[GatedBatch]:
    """Within the block, the objective of every sentence of a batch as a function of head gates.

    A closed head's context is replaced by the method `ablate_with`, or by `other_contexts`, those of another text with
    the same number of positions.
    """
    f = GatedBatch(checkpoint, objective, batch, layer_index=layer_index, of=of, keep=keep)
    with f.cache.activate():
        with torch.no_grad():
            f.cache.value(split_gates(f.gates[0], f.layout), keep=True)
        contexts = f.cache.contexts
        f.cache.instead = other_contexts or REPLACEMENTS[ablate_with](contexts, batch, objective.seed)
        yield f
