"""Soft gates of heads, fitted to what a model should say, with and against their removal (Nam et al. 2025).

A gate G = σ(θ) multiplies each head's context before the output projection; the model is frozen. θ minimises

    −mean over sentences of (mean over predicted tokens of log p) − λ · mean over heads of clip(θ, −4, 4)

first with λ = 0 from θ = logit(U(0, 1)), then from there with λ > 0, which pulls all gates open that nothing else
holds, and with λ < 0, which pulls them shut. Several fits go through the model together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headscope.attribution.gatevector import split_gates
from headscope.attribution.objectives.base import negative_log_likelihood
from headscope.data.encoded import IGNORED, Batch, Side
from headscope.errors import NumericalError
from headscope.formats.base import Checkpoint
from headscope.heads import Layout
from headscope.model.discovery import eval_mode
from headscope.model.gating import gated
from headscope.model.gradients import frozen_parameters

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
    """Gates [r N] of r fits: `kept` with λ > 0 (G⁺), `shed` with λ < 0 (G⁻), heads as `split_gates` has them.

    `losses` [3 r] are means over the last tenth of the updates: without penalty, of `kept` and of `shed`.
    """

    kept: Tensor
    shed: Tensor
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
    order = _shuffled(len(examples), fit.batch, generator)
    descent = _Descent(checkpoint, examples, layout, fit, order)
    with eval_mode(checkpoint.model), frozen_parameters(checkpoint.model):
        theta, first = descent.run(theta, theta.new_zeros(fit.fits), fit.rates)
        pull = theta.new_tensor([fit.penalty, -fit.penalty]).repeat_interleave(fit.fits)
        theta, second = descent.run(theta.repeat(2, 1), pull, fit.penalised_rates)
    kept, shed = theta.sigmoid().double().cpu().split(fit.fits)
    return FittedGates(kept, shed, torch.cat([first, second]).view(3, fit.fits), layout)


def scores(gates: FittedGates) -> dict[str, Tensor]:
    """Facilitation G⁻, interference 1 − G⁺ and irrelevance G⁺ (1 − G⁻) [r N] of every fit (Nam et al., table 1)."""
    return {"facilitation": gates.shed, "interference": 1 - gates.kept, "irrelevance": gates.kept * (1 - gates.shed)}


def gated_losses(checkpoint: Checkpoint, gates: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """Mean -log p of what each sentence should say [r b], under gates [r N] of every fit."""
    fits, sentences = len(gates), len(batch.indices)
    rows = batch.rows(torch.arange(sentences).repeat(fits)).to(checkpoint.device)
    assert rows.labels is not None, "the batch was read without labels"
    with gated(checkpoint.model, split_gates(gates.repeat_interleave(sentences, dim=0), layout)):
        nll, counts = negative_log_likelihood(checkpoint.logits(rows), rows.labels)
    return (nll / counts).view(fits, sentences)


def penalised(losses: Tensor, theta: Tensor, pull: Tensor) -> Tensor:
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
            penalty = penalised(torch.zeros_like(total), theta, pull)
            gradient += torch.autograd.grad(penalty.sum(), theta)[0]
        if not bool(total.isfinite().all() and gradient.isfinite().all()):
            raise NumericalError("the loss of the gates is no number; take a wider --dtype")
        norm = gradient.norm(dim=-1, keepdim=True)  # [r 1]
        return total.double().cpu(), gradient * (LARGEST / (norm + EDGE)).clamp(max=1)

    def _passes(self, numbers: list[int], fits: int) -> Iterator[Batch]:
        """The sentences in batches of like length that all fits can go through at once."""
        ordered = sorted((self.examples[number] for number in numbers), key=lambda example: example.positions)
        group: list[Batch] = []
        for example in ordered:
            if group and example.positions * (len(group) + 1) * fits > self.fit.tokens:
                yield joined(group)
                group = []
            group.append(example)
        yield joined(group)


def single_sentences(batches: Iterator[Batch]) -> list[Batch]:
    """Batches of one sentence each, of those that something is to be said of: of prompts, the answer."""
    return [
        batch.rows(torch.tensor([row]))
        for batch in map(_asked, batches)
        for row in range(len(batch.indices))
        if batch.labels is not None and bool((batch.labels[row] != IGNORED).any())
    ]


def _asked(batch: Batch) -> Batch:
    """A batch of prompts with the answers as its only labels; any other batch as it is."""
    if batch.contrasts is None or batch.labels is None:
        return batch
    labels = torch.full_like(batch.labels, IGNORED)
    labels[torch.arange(len(labels)), batch.contrasts.positions] = batch.contrasts.answers
    return replace(batch, labels=labels, contrasts=None)


def joined(examples: Sequence[Batch]) -> Batch:
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


def _shuffled(count: int, batch: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Numbers below `count` without end, `batch` at a time (all of them where there are fewer), in ever new orders."""
    size, waiting = min(batch, count), list[int]()
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]
