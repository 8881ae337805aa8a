"""Gates between full attention and attention to the first and the last keys only (DuoAttention, Xiao et al. 2024).

A gate α of each key/value head mixes both, α · full + (1 − α) · streaming, and is learnt so that the final states of
the model change little while the gates are penalised for staying open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.errors import NumericalError
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import AttentionCall, repeat_groups, tapped
from headscope.model.discovery import eval_mode, track_calls
from headscope.model.gradients import frozen_parameters

Gates = Mapping[tuple[Site, int], Tensor]
"""Gates [g] of every (site, layer), one a key/value head."""


@dataclass(frozen=True, kw_only=True)
class StreamingFit:
    """How gates are learnt: first `sink` and last `recent` keys (a query's own among them), weight of the penalty."""

    sink: int = 128
    recent: int = 256
    penalty: float = 0.05
    steps: int = 2000
    learning_rate: float = 0.02


@dataclass(frozen=True)
class LabelledText:
    """Ids of a text, of which those from `first` on are what the model must be able to say."""

    ids: list[int]
    first: int


def streaming_keys(queries: int, keys: int, *, sink: int, recent: int, device: torch.device | None = None) -> Tensor:
    """Which keys streaming attention may see [t s]: the first `sink`, the last `recent` with the query itself."""
    t = torch.arange(keys - queries, keys, device=device)[:, None]
    s = torch.arange(keys, device=device)
    return (s <= t) & ((s < sink) | (t - s < recent))


def streaming_weights(weights: Tensor, visible: Tensor, rest: Tensor | float = 0.0) -> Tensor:
    """Weights [b h t s] of a softmax over the visible keys [t s] alone, from those over all keys.

    `rest` [b h t] is the share that a learnt sink has of the softmax, where rows sum to less than one (gpt-oss).
    """
    kept = weights * visible
    return kept / (kept.sum(dim=-1) + rest).clamp(min=torch.finfo(weights.dtype).tiny)[..., None]


@contextmanager
def mixed_with_streaming(checkpoint: Checkpoint, gates: Gates, fit: StreamingFit) -> Iterator[None]:
    """Within the block every head's context is α · full + (1 − α) · streaming, α being its group's gate."""
    with track_calls(checkpoint.model) as tracker:

        def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
            place = tracker.attention_site(call.module)
            if place is None or (place.site, place.layer) not in gates:
                return None
            weights, heads = call.weights, call.weights.shape[1]
            t, s = weights.shape[-2:]
            visible = streaming_keys(t, s, sink=fit.sink, recent=fit.recent, device=weights.device)
            rest = (1 - weights.sum(dim=-1)).clamp(min=0) if hasattr(call.module, "sinks") else 0.0
            streamed = streaming_weights(weights, visible, rest) @ repeat_groups(call.value, heads)
            gate = gates[place.site, place.layer].to(context)
            alpha = gate.repeat_interleave(heads // len(gate))[:, None, None]  # [h 1 1]
            return alpha * context + (1 - alpha) * streamed

        with tapped(tap, before_mixing=True):
            yield


def distillation_loss(checkpoint: Checkpoint, gates: Gates, text: LabelledText, fit: StreamingFit) -> Tensor:
    """Mean over the labelled tokens and channels of (H_full − H_mixed)² plus penalty · mean of |α|."""
    side = pad_side([Encoded(text.ids, [False] * len(text.ids))]).to(checkpoint.device)
    batch = Batch(torch.zeros(1, dtype=torch.long), 0, side)
    with torch.no_grad():
        full = checkpoint.states(batch)[0, text.first :].float()  # [n d]
    with mixed_with_streaming(checkpoint, gates, fit):
        mixed = checkpoint.states(batch)[0, text.first :].float()
    penalty = torch.cat([gate.abs() for gate in gates.values()]).mean()
    return (full - mixed).square().mean() + fit.penalty * penalty


def learning_rate_share(step: int, steps: int) -> float:
    """Share of the learning rate in a step: up from a tenth over the first fifth of them, down over the last one."""
    fifth = max(steps // 5, 1)
    return min(1.0, max((step + 1) / fifth, 0.1), max((steps - step) / fifth, 0.1))


def learn_gates(
    checkpoint: Checkpoint, texts: Iterator[LabelledText], fit: StreamingFit
) -> dict[tuple[Site, int], Tensor]:
    """Gates in [0, 1] of every key/value head of the decoder's self attention, from 1; one text a step, AdamW.

    NumericalError where the loss is no number.
    """
    gates = {
        (part.site, part.layer): torch.ones(part.groups, device=checkpoint.device, requires_grad=True)
        for part in checkpoint.attention_sites.at(Site.DECODER_SELF)
        if part.heads
    }
    optimiser = torch.optim.AdamW(gates.values(), lr=fit.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: learning_rate_share(step, fit.steps))
    with eval_mode(checkpoint.model), frozen_parameters(checkpoint.model), torch.enable_grad():
        for _ in range(fit.steps):
            _clamp(gates)
            loss = distillation_loss(checkpoint, gates, next(texts), fit)
            if not bool(loss.isfinite()):
                raise NumericalError("the loss of the streaming gates is no number; take a wider --dtype")
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    _clamp(gates)
    return {place: gate.detach().double().cpu() for place, gate in gates.items()}


@torch.no_grad()
def _clamp(gates: Gates) -> None:
    for gate in gates.values():
        gate.clamp_(0, 1)
