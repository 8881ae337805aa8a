"""Soft gates of heads, fitted by gradients with the model frozen: two methods.

**Causal gates** are fitted to what a model should say, with and against the removal of heads (Nam et al. 2025). A gate
G = σ(θ) multiplies each head's context before the output projection. θ minimises

    −mean over sentences of (mean over predicted tokens of log p) − λ · mean over heads of clip(θ, −4, 4)

first with λ = 0 from θ = logit(U(0, 1)), then from there with λ > 0, which pulls all gates open that nothing else
holds, and with λ < 0, which pulls them shut. Several fits go through the model together.

**Streaming gates** are between full attention and attention to the first and the last keys only (DuoAttention, Xiao et
al. 2024). A gate α of each key/value head mixes both, α · full + (1 − α) · streaming, and is learnt so that the final
states of the model change little while the gates are penalised for staying open.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headscope.attribution.gatevector import split_gates
from headscope.attribution.objectives.base import negative_log_likelihood
from headscope.data.encoded import IGNORED, Batch, Encoded, Side, pad_side
from headscope.errors import NumericalError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import Layout, Site
from headscope.model.attention import AttentionCall, repeat_groups
from headscope.model.discovery import AttentionSite, eval_mode
from headscope.model.taps import frozen_parameters, gated, tapped_sites

CLIP = 4.0
"""|θ| from which on the penalty pulls no further: gates of 0.982 and 0.018."""
LARGEST = 1.0
"""Norm that the gradient of one fit is cut to."""
EDGE = 1e-6
"""How far from 0 and 1 a gate begins: U(0, 1) may be 0."""


@dataclass(frozen=True, kw_only=True)
class GatingFit:
    """How gates are fitted: `fits` from random starts, `steps` updates a phase, each on `batch` sentences.

    Learning rates fall linearly, from the first to the second of a pair: `rates` without penalty, `penalised_rates`
    with it. `penalty` is |λ|. A pass has at most `tokens` positions, or one sentence for all fits.
    """

    fits: int = 10
    steps: int = 500
    batch: int = 64
    rates: tuple[float, float] = (0.1, 0.01)
    penalised_rates: tuple[float, float] = (0.5, 0.1)
    penalty: float = 0.1
    tokens: int = 2048
    seed: int = 1


@dataclass(frozen=True)
class FittedGates:
    """Gates [r N] of r fits: `plus` with λ > 0 (G⁺), `minus` with λ < 0 (G⁻), heads as `split_gates` has them.

    `losses` [3 r] are means over the last tenth of the updates: without penalty, of both.
    """

    plus: Tensor
    minus: Tensor
    losses: Tensor
    layout: Layout


def fit_gates(checkpoint: Checkpoint, examples: Sequence[Batch], fit: GatingFit) -> FittedGates:
    """The gates of every head that runs, from `examples`: batches of one sentence each, with labels.

    Deterministic by the seed. NumericalError where a loss is no number.
    """
    assert not checkpoint.two_sided or examples[0].target is not None, "an encoder-decoder needs a target"
    layout = {place: heads for place, heads in checkpoint.layout.items() if heads}
    generator = torch.Generator().manual_seed(fit.seed)
    dtype = torch.float64 if checkpoint.dtype is torch.float64 else torch.float32
    start = torch.rand(fit.fits, sum(layout.values()), generator=generator, dtype=torch.float64)
    theta = torch.logit(start.clamp(EDGE, 1 - EDGE)).to(checkpoint.device, dtype)
    order = _draw_batches(len(examples), fit.batch, generator)
    descent = _Descent(checkpoint, examples, layout, fit, order)
    with eval_mode(checkpoint.model), frozen_parameters(checkpoint.model):
        theta, first = descent.run(theta, theta.new_zeros(fit.fits), fit.rates)
        pull = theta.new_tensor([fit.penalty, -fit.penalty]).repeat_interleave(fit.fits)
        theta, second = descent.run(theta.repeat(2, 1), pull, fit.penalised_rates)
    gates_kept, gates_shed = theta.sigmoid().double().cpu().split(fit.fits)
    return FittedGates(gates_kept, gates_shed, torch.cat([first, second]).view(3, fit.fits), layout)


def scores(gates: FittedGates) -> dict[str, Tensor]:
    """Facilitation G⁻, interference 1 − G⁺ and irrelevance G⁺ (1 − G⁻) [r N] of every fit (Nam et al., table 1)."""
    return {"facilitation": gates.minus, "interference": 1 - gates.plus, "irrelevance": gates.plus * (1 - gates.minus)}


def gated_losses(checkpoint: Checkpoint, gates: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """Mean -log p of what each sentence should say [r b], under gates [r N] of every fit."""
    fits, sentences = len(gates), len(batch.indices)
    rows = batch.rows(torch.arange(sentences).repeat(fits)).to(checkpoint.device)
    assert rows.labels is not None, "the batch was read without labels"
    with gated(checkpoint.model, split_gates(gates.repeat_interleave(sentences, dim=0), layout)):
        nll, counts = negative_log_likelihood(checkpoint.logits(rows), rows.labels)
    return (nll / counts).view(fits, sentences)


def penalize(losses: Tensor, theta: Tensor, pull: Tensor) -> Tensor:
    """The objective [r] of every fit, for losses [r], θ [r N] and λ [r]."""
    return losses - pull * theta.clamp(-CLIP, CLIP).mean(dim=-1)


@dataclass(frozen=True)
class _Descent:
    """Adam on θ of several fits at once, which see the same sentences and do not touch each other."""

    checkpoint: Checkpoint
    examples: Sequence[Batch]
    layout: Layout
    fit: GatingFit
    order: Iterator[list[int]]

    def run(self, start: Tensor, pull: Tensor, rates: tuple[float, float]) -> tuple[Tensor, Tensor]:
        """θ [r N] after all steps from `start`, with λ [r], and the mean losses [r] of the last tenth of them."""
        theta, steps = start.clone().requires_grad_(), self.fit.steps
        optimiser = torch.optim.Adam([theta], lr=rates[0])
        schedule = torch.optim.lr_scheduler.LinearLR(optimiser, 1.0, rates[1] / rates[0], total_iters=steps)
        last = max(steps // 10, 1)
        total = torch.zeros(len(theta), dtype=torch.float64)
        for step in range(steps):
            losses, theta.grad = self._step(theta, pull, next(self.order))
            optimiser.step()
            schedule.step()
            if step >= steps - last:
                total += losses
        return theta.detach(), total / last

    def _step(self, theta: Tensor, pull: Tensor, numbers: list[int]) -> tuple[Tensor, Tensor]:
        """Losses [r] on these sentences, and the gradient [r N] of the objective, of each fit cut to a norm of 1."""
        total, gradient = theta.new_zeros(len(theta)), torch.zeros_like(theta)
        with torch.enable_grad():
            for batch in self._passes(numbers, len(theta)):
                losses = gated_losses(self.checkpoint, theta.sigmoid(), batch, self.layout).sum(dim=1) / len(numbers)
                gradient += torch.autograd.grad(losses.sum(), theta)[0]
                total += losses.detach()
            penalty = penalize(torch.zeros_like(total), theta, pull)
            gradient += torch.autograd.grad(penalty.sum(), theta)[0]
        if not bool(total.isfinite().all() and gradient.isfinite().all()):
            raise NumericalError(f"the loss of the gates is no number; take a wider {flag.dtype}")
        norm = gradient.norm(dim=-1, keepdim=True)  # [r 1]
        return total.double().cpu(), gradient * (LARGEST / (norm + EDGE)).clamp(max=1)

    def _passes(self, numbers: list[int], fits: int) -> Iterator[Batch]:
        """The sentences in batches of like length that all fits can go through at once."""
        by_length = sorted((self.examples[number] for number in numbers), key=lambda example: example.positions)
        group: list[Batch] = []
        for example in by_length:
            if group and example.positions * (len(group) + 1) * fits > self.fit.tokens:
                yield join_batches(group)
                group = []
            group.append(example)
        yield join_batches(group)


def single_sentences(batches: Iterator[Batch]) -> list[Batch]:
    """Batches of one sentence each, of those that something is to be said of: of prompts, the answer."""
    return [
        batch.rows(torch.tensor([row]))
        for batch in map(_answers_as_labels, batches)
        for row in range(len(batch.indices))
        if batch.labels is not None and bool((batch.labels[row] != IGNORED).any())
    ]


def _answers_as_labels(batch: Batch) -> Batch:
    """A batch of prompts with the answers as its only labels; any other batch as it is."""
    if batch.contrasts is None or batch.labels is None:
        return batch
    labels = torch.full_like(batch.labels, IGNORED)
    labels[torch.arange(len(labels)), batch.contrasts.positions] = batch.contrasts.answers
    return replace(batch, labels=labels, contrasts=None)


def join_batches(examples: Sequence[Batch]) -> Batch:
    """Batches of one sentence each as one."""
    targets = [example.target for example in examples if example.target is not None]
    labels = [example.labels[0] for example in examples if example.labels is not None]
    return Batch(
        indices=torch.cat([example.indices for example in examples]),
        fold=0,
        source=_padded([example.source for example in examples]),
        target=_padded(targets) if targets else None,
        labels=pad_sequence(labels, batch_first=True, padding_value=IGNORED),
    )


def _padded(sides: Sequence[Side]) -> Side:
    ids, real, special = (
        pad_sequence([getattr(side, name)[0] for side in sides], batch_first=True)
        for name in ("ids", "real", "special")
    )
    segments = [side.segments[0] for side in sides if side.segments is not None]
    return Side(ids, real, special, pad_sequence(segments, batch_first=True) if segments else None)


def _draw_batches(count: int, batch: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Numbers below `count` without end, `batch` at a time (all of them where there are fewer), in ever new orders."""
    size, waiting = min(batch, count), list[int]()
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


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


def streaming_weights(weights: Tensor, visible: Tensor, sink_share: Tensor | float = 0.0) -> Tensor:
    """Weights [b h t s] of a softmax over the visible keys [t s] alone, from those over all keys.

    `sink_share` [b h t] is the share that a learnt sink has of the softmax, where rows sum to less than one (gpt-oss).
    """
    visible_weights = weights * visible
    return (
        visible_weights
        / (visible_weights.sum(dim=-1) + sink_share).clamp(min=torch.finfo(weights.dtype).tiny)[..., None]
    )


@contextmanager
def mixed_with_streaming(checkpoint: Checkpoint, gates: Gates, fit: StreamingFit) -> Iterator[None]:
    """Within the block every head's context is α · full + (1 − α) · streaming, α being its group's gate."""

    def tap(site: AttentionSite, call: AttentionCall, context: Tensor) -> Tensor | None:
        if site.place not in gates:
            return None
        weights, heads = call.weights, call.weights.shape[1]
        visible = streaming_keys(*weights.shape[-2:], sink=fit.sink, recent=fit.recent, device=weights.device)
        sink_share = (1 - weights.sum(dim=-1)).clamp(min=0) if hasattr(call.module, "sinks") else 0.0
        streaming = streaming_weights(weights, visible, sink_share) @ repeat_groups(call.value, heads)
        gate = gates[site.place].to(context)
        alpha = gate.repeat_interleave(heads // len(gate))[:, None, None]  # [h 1 1]
        return alpha * context + (1 - alpha) * streaming

    with tapped_sites(checkpoint.model, tap, before_mixing=True):
        yield


def distillation_loss(checkpoint: Checkpoint, gates: Gates, text: LabelledText, fit: StreamingFit) -> Tensor:
    """Mean over the labelled tokens and channels of (H_full − H_mixed)² plus penalty · mean of |α|."""
    side = pad_side([Encoded(text.ids, [False] * len(text.ids))]).to(checkpoint.device)
    batch = Batch(torch.zeros(1, dtype=torch.long), 0, side)
    with torch.no_grad():
        full = checkpoint.states(batch)[0, text.first :].float()  # [n d]
    with mixed_with_streaming(checkpoint, gates, fit):
        mixture = checkpoint.states(batch)[0, text.first :].float()
    penalty = torch.cat([gate.abs() for gate in gates.values()]).mean()
    return (full - mixture).square().mean() + fit.penalty * penalty


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
        part.place: torch.ones(part.groups, device=checkpoint.device, requires_grad=True)
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
                raise NumericalError(f"the loss of the streaming gates is no number; take a wider {flag.dtype}")
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
