"""Activation patching: the effect of replacing a head's context in one run by that of another, exact or first order.

m is the objective `answer`. There is a run on each of a pair of prompts. `Direction` "noising" patches the run on the
clean prompt with a head's context on the corrupt one, "denoising" the other way round. An effect is positive where the
head's context on the clean prompt raises m: m(clean) − m(patched), or m(patched) − m(corrupt).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.attribution.gatevector import Tick, ablation, explained_batch, split_gates
from headscope.attribution.objectives.predictions import AnswerObjective
from headscope.data.encoded import Batch
from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.model.attention import AttentionCall, precise
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import LayerIndex
from headscope.model.streaming import recomputed_context
from headscope.model.taps import differentiable_contexts, gradients_of, tapped_sites

Direction = Literal["noising", "denoising"]
Effects = Mapping[SiteLayer, Tensor]
"""Effects [b h] of the heads of every (site, layer)."""
CONTEXT = "context"
CHANNELS = ("query", "key", "value")


def _runs(batch: Batch, direction: Direction) -> tuple[Batch, Batch, float]:
    """The batch of the patched run, that of the source of contexts, and the sign by which a rise of m is an effect."""
    clean, corrupt = batch, batch.corrupted_batch
    return (clean, corrupt, -1.0) if direction == "noising" else (corrupt, clean, 1.0)


@dataclass(frozen=True)
class PromptEffects:
    """Effects by patched component, and m [b] of the clean and of the corrupt prompts, on the CPU."""

    effects: Mapping[str, Effects]
    clean: Tensor
    corrupt: Tensor

    @classmethod
    def of(cls, effects: Mapping[str, Effects], sign: float, patched_value: Tensor, other: Tensor) -> PromptEffects:
        """Effects with m of the run that is patched, before patching, and of the `other` run; `sign` as of `_runs`."""
        clean, corrupt = (patched_value, other) if sign < 0 else (other, patched_value)
        on_cpu = {
            name: {site_layer: values.cpu() for site_layer, values in part.items()} for name, part in effects.items()
        }
        return cls(on_cpu, clean.detach().cpu(), corrupt.detach().cpu())


@dataclass
class Recording:
    """One pass: m [b], and at every (site, layer) its calls and its contexts [b h t k] after mixing."""

    values: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: dict[SiteLayer, list[AttentionCall]] = field(default_factory=dict)
    contexts: dict[SiteLayer, list[Tensor]] = field(default_factory=dict)


def record_contexts(checkpoint: Checkpoint, batch: Batch, *, differentiable: bool = False) -> Recording:
    """One pass over prompts; with `differentiable` its contexts are part of the graph of m."""
    recording = Recording()

    def tap(site: AttentionSite, call: AttentionCall, context: Tensor) -> None:
        recording.calls.setdefault(site.site_layer, []).append(replace(call, made_weights=None))
        recording.contexts.setdefault(site.site_layer, []).append(context)

    with (
        eval_mode(checkpoint.model),
        differentiable_contexts() if differentiable else torch.no_grad(),
        tapped_sites(checkpoint.model, tap),
    ):
        recording.values = AnswerObjective().values(checkpoint, batch)
    return recording


def exact_effects(
    checkpoint: Checkpoint,
    batch: Batch,
    *,
    direction: Direction,
    layer_index: LayerIndex | None,
    tick: Tick = lambda share: None,
) -> PromptEffects:
    """Effects of patching the context of one head at all positions, with one pass over the batch for each head.

    With a `layer_index` layers below the head are not computed again.
    """
    patched_run, source, sign = _runs(batch, direction)
    other = record_contexts(checkpoint, source)
    evaluator = explained_batch(
        checkpoint, AnswerObjective(), patched_run, layer_index=layer_index, of="value", other_contexts=other.contexts
    )
    with torch.inference_mode(), evaluator as f:
        effects = split_gates(-sign * ablation(f, f.gates, tick=tick), f.layout)
        return PromptEffects.of({CONTEXT: effects}, sign, f(f.gates), other.values)


def first_order_effects(checkpoint: Checkpoint, batch: Batch, *, direction: Direction) -> PromptEffects:
    """Effects to first order, from one backward pass: of a head's "context", "query", "key" and "value".

    Context: (z' − z) · ∂m/∂z summed over positions and width (attribution patching, Nanda 2023; Syed et al. 2023). For
    a query, key or value the context is recomputed with that of the other run, softmax included, for
    (z(q') − z) · ∂m/∂z: for queries and keys this is Σ (A' − A) · ∂m/∂A, the correction of AtP* (Kramár et al. 2024),
    with all positions of a head patched at once. Keys and values of a group count for each of its heads.
    """
    patched_run, source, sign = _runs(batch, direction)
    other, base = record_contexts(checkpoint, source), record_contexts(checkpoint, patched_run, differentiable=True)
    calls = [(site_layer, n) for site_layer, layer_calls in base.calls.items() for n in range(len(layer_calls))]
    unmixed = [base.calls[site_layer][n].context for site_layer, n in calls]
    mixed = [base.contexts[site_layer][n] for site_layer, n in calls]
    with torch.enable_grad():
        gradients = gradients_of(base.values, [*unmixed, *mixed])
    effects: dict[str, dict[SiteLayer, Tensor]] = {name: {} for name in (CONTEXT, *CHANNELS)}
    for number, (site_layer, n) in enumerate(calls):
        call, other_call = base.calls[site_layer][n], other.calls[site_layer][n]
        unmixed_gradient, mixed_gradient = gradients[number], gradients[len(calls) + number]
        _add(effects[CONTEXT], site_layer, other.contexts[site_layer][n] - mixed[number], mixed_gradient, sign)
        for name in CHANNELS:  # the context with the query, key or value of the other run
            states = {channel: getattr(other_call if channel == name else call, channel) for channel in CHANNELS}
            with torch.no_grad():
                difference = recomputed_context(call, **states) - unmixed[number]
            _add(effects[name], site_layer, difference, unmixed_gradient, sign)
    return PromptEffects.of(effects, sign, base.values, other.values)


def integrated_effects(checkpoint: Checkpoint, batch: Batch, *, steps: int) -> PromptEffects:
    """(z_clean − z_corrupt) · mean of ∂m/∂z along the straight path of input embeddings (EAP-IG, Hanna et al. 2024).

    Gradients are at e_corrupt + (n / steps)(e_clean − e_corrupt) for n from 0 to steps − 1, as in the authors' program.
    Both directions are the same. CheckpointError where the embeddings of a model are not found.
    """
    clean, corrupt = record_contexts(checkpoint, batch), record_contexts(checkpoint, batch.corrupted_batch)
    effects: dict[SiteLayer, Tensor] = {}
    for step in range(steps):
        with interpolate_prompts(checkpoint, batch, step / steps):
            run = record_contexts(checkpoint, batch, differentiable=True)
        calls = [(site_layer, n) for site_layer, contexts in run.contexts.items() for n in range(len(contexts))]
        with torch.enable_grad():
            gradients = gradients_of(run.values, [run.contexts[site_layer][n] for site_layer, n in calls])
        for (site_layer, n), gradient in zip(calls, gradients, strict=True):
            difference = clean.contexts[site_layer][n] - corrupt.contexts[site_layer][n]
            _add(effects, site_layer, difference, gradient, 1 / steps)
    return PromptEffects.of({CONTEXT: effects}, -1.0, clean.values, corrupt.values)


@contextmanager
def interpolate_prompts(checkpoint: Checkpoint, batch: Batch, share: float) -> Iterator[None]:
    """Within the block, embeddings of clean prompts are interpolated from the corrupt prompts' (0) to their own (1).

    This holds for the first call of each embedding module with the ids of the prompts (a decoder may read the same).
    """
    assert batch.contrasts is not None
    ids, corrupt, mixed_modules = batch.source.ids, batch.contrasts.corrupt.ids, set()

    def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        ids_read = inputs[0] if inputs else None
        if module in mixed_modules or not isinstance(ids_read, Tensor) or not torch.equal(ids_read, ids):
            return None
        mixed_modules.add(module)
        start: Tensor = module.forward(corrupt)
        return start + share * (output - start)

    with watch_modules([part for part in checkpoint.model.modules() if isinstance(part, nn.Embedding)], hook):
        yield
    if not mixed_modules:
        raise CheckpointError("the embeddings of its tokens cannot be found, so there is no path between two prompts")


def _add(
    effects: dict[SiteLayer, Tensor], site_layer: SiteLayer, difference: Tensor, gradient: Tensor, factor: float
) -> None:
    """Add factor · Σ over positions and width of difference · gradient [b h t k] to a layer's effects [b h]."""
    values = factor * (precise(difference.detach()) * precise(gradient)).sum(dim=(2, 3))
    effects[site_layer] = effects[site_layer] + values if site_layer in effects else values
