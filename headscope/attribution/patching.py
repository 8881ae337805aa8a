"""Activation patching: contexts of one run put into another, exactly or to first order.

m is the objective `answer`. A pair of prompts has a run on each; `Direction` says which is changed: "noising" puts what
a head gives on the corrupt prompt into the run on the clean one, "denoising" the other way round. Every effect is
positive where what the head does on the clean prompt speaks for the answer: m(clean) − m(patched), or m(patched) −
m(corrupt).
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
from headscope.heads import Site
from headscope.model.attention import AttentionCall, precise
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.interface import watch_modules
from headscope.model.prefix_cache import LayerIndex
from headscope.model.streaming import recomputed_context
from headscope.model.taps import differentiable_contexts, gradients_of, tapped_sites

Direction = Literal["noising", "denoising"]
Place = tuple[Site, int]
Effects = Mapping[Place, Tensor]
"""Effects [b h] of the heads of every (site, layer)."""
CONTEXT = "context"
CHANNELS = ("query", "key", "value")


def _runs(batch: Batch, direction: Direction) -> tuple[Batch, Batch, float]:
    """The run that is changed, that where changes come from, and the sign that turns a rise of m into an effect."""
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
        """With the m of both runs."""
        clean, corrupt = (patched_value, other) if sign < 0 else (other, patched_value)
        on_cpu = {name: {place: values.cpu() for place, values in of.items()} for name, of in effects.items()}
        return cls(on_cpu, clean.detach().cpu(), corrupt.detach().cpu())


@dataclass
class Recording:
    """One pass: m [b], and at every (site, layer) its calls and the contexts [b h t k] that go on after mixing."""

    values: Tensor = field(default_factory=lambda: torch.empty(0))
    calls: dict[Place, list[AttentionCall]] = field(default_factory=dict)
    contexts: dict[Place, list[Tensor]] = field(default_factory=dict)


def record_contexts(checkpoint: Checkpoint, batch: Batch, *, differentiable: bool = False) -> Recording:
    """One pass over prompts; with `differentiable` its contexts are part of the graph of m."""
    recording = Recording()

    def tap(site: AttentionSite, call: AttentionCall, context: Tensor) -> None:
        recording.calls.setdefault(site.place, []).append(replace(call, made_weights=None))
        recording.contexts.setdefault(site.place, []).append(context)

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
    """Effects of the context of one head at all positions, one pass a head over the whole batch.

    Layers below the head are not computed again where the model has a `layer_index`.
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
    """Effects to first order, from one backward pass: of the "context", and of "query", "key" and "value" of a head.

    Context: (z' − z) · ∂m/∂z summed over positions and width (attribution patching, Nanda 2023; Syed et al. 2023). For
    a query, key or value the context is computed anew with that of the other run in its place, softmax included, and
    (z(q') − z) · ∂m/∂z is taken: for queries and keys that is Σ (A' − A) · ∂m/∂A, the correction of AtP* (Kramár et al.
    2024), with all positions of a head patched at once. Keys and values of a group count for each of its
    heads.
    """
    patched_run, source, sign = _runs(batch, direction)
    other, base = record_contexts(checkpoint, source), record_contexts(checkpoint, patched_run, differentiable=True)
    places = [(place, turn) for place, calls in base.calls.items() for turn in range(len(calls))]
    before = [base.calls[place][turn].context for place, turn in places]
    after = [base.contexts[place][turn] for place, turn in places]
    with torch.enable_grad():
        gradients = gradients_of(base.values, [*before, *after])
    effects: dict[str, dict[Place, Tensor]] = {name: {} for name in (CONTEXT, *CHANNELS)}
    for number, (place, turn) in enumerate(places):
        call, other_call = base.calls[place][turn], other.calls[place][turn]
        differences = {CONTEXT: other.contexts[place][turn] - after[number]}
        for name in CHANNELS:  # the context with the query, key or value of the other run
            states = {channel: getattr(other_call if channel == name else call, channel) for channel in CHANNELS}
            with torch.no_grad():
                differences[name] = recomputed_context(call, **states) - before[number]
        for name, difference in differences.items():
            gradient = gradients[number + (len(places) if name == CONTEXT else 0)]
            _add(effects[name], place, difference, gradient, sign)
    return PromptEffects.of(effects, sign, base.values, other.values)


def integrated_effects(checkpoint: Checkpoint, batch: Batch, *, steps: int) -> PromptEffects:
    """(z_clean − z_corrupt) · mean of ∂m/∂z along the straight path of input embeddings (EAP-IG, Hanna et al. 2024).

    The gradient is taken at e_corrupt + (n / steps)(e_clean − e_corrupt) for n from 0 to steps − 1, as in the authors'
    program. It is the same in both directions. CheckpointError where the embeddings of a model are not to be found.
    """
    clean, corrupt = record_contexts(checkpoint, batch), record_contexts(checkpoint, batch.corrupted_batch)
    effects: dict[Place, Tensor] = {}
    for step in range(steps):
        with interpolate_prompts(checkpoint, batch, step / steps):
            run = record_contexts(checkpoint, batch, differentiable=True)
        places = [(place, turn) for place, contexts in run.contexts.items() for turn in range(len(contexts))]
        with torch.enable_grad():
            gradients = gradients_of(run.values, [run.contexts[place][turn] for place, turn in places])
        for (place, turn), gradient in zip(places, gradients, strict=True):
            difference = clean.contexts[place][turn] - corrupt.contexts[place][turn]
            _add(effects, place, difference, gradient, 1 / steps)
    return PromptEffects.of({CONTEXT: effects}, -1.0, clean.values, corrupt.values)


@contextmanager
def interpolate_prompts(checkpoint: Checkpoint, batch: Batch, share: float) -> Iterator[None]:
    """Within the block the clean prompts of a batch are read as this share of the way from the corrupt ones to them.

    The embeddings of tokens are mixed: of every embedding that is asked for the ids of the prompts, at its first call
    (a decoder may have the same).
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


def _add(effects: dict[Place, Tensor], place: Place, difference: Tensor, gradient: Tensor, factor: float) -> None:
    """Add factor · Σ over positions and width of difference · gradient: [b h], in float32 at least."""
    values = factor * (precise(difference.detach()) * precise(gradient)).sum(dim=(2, 3))
    effects[place] = effects[place] + values if place in effects else values
