"""Causal Head Gating: heads that make a text likelier, that make it less likely, and neither (Nam et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd
import torch
from scipy.special import bdtrc
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from headscope.attribution.gatevector import split_gates
from headscope.attribution.objectives.base import negative_log_likelihood
from headscope.bootstrap import Estimate
from headscope.config import option
from headscope.config.declarations import HeadFunction, Measure
from headscope.data.batching import Omissions, batches, sentence_limit
from headscope.data.corpus import Corpus
from headscope.data.encoded import IGNORED, Batch, Side, groups
from headscope.engine.base import Analysis, analysis
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelTests, Rate, head_table
from headscope.errors import ConfigError, DataError, NumericalError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import Layout, SiteLayer
from headscope.model.discovery import eval_mode
from headscope.model.taps import frozen_parameters, gated

gating_option = partial(option, panel="Causal head gating")
CLIP = 4.0
"""|θ| at which the penalty stops growing: gates of 0.982 and 0.018."""
MAX_NORM = 1.0
"""The norm to which the gradient of one fit is clipped."""
EDGE = 1e-6
"""The least distance of a gate's start from 0 and 1: U(0, 1) may draw 0."""
THRESHOLD = 0.5
LABELS = {"facilitation": "facilitating", "interference": "interfering"}
PHASES = ("without penalty", "kept", "shed")


@dataclass(frozen=True)
class CausalHeadGatingOptions:
    """Options of `causal_head_gating`."""

    chg_fits: int = gating_option(10, "Fits from random starts; a label needs five or more.", metavar="N", minimum=1)
    chg_steps: int = gating_option(500, "Updates of each of the three phases of a fit.", metavar="N", minimum=1)
    chg_batch: int = gating_option(64, "Sentences of an update.", metavar="N", minimum=1)
    chg_lr: tuple[float, ...] = gating_option(
        (0.1, 0.01), "Learning rate without penalty, at the beginning and at the end.", metavar="NUMBER,NUMBER"
    )
    chg_penalised_lr: tuple[float, ...] = gating_option((0.5, 0.1), "The same with penalty.", metavar="NUMBER,NUMBER")
    chg_penalty: float = gating_option(
        0.1, "Weight of the mean logit of all gates in the loss.", metavar="NUMBER", minimum=0
    )

    def __post_init__(self) -> None:
        for name, rates in ((flag.chg_lr, self.chg_lr), (flag.chg_penalised_lr, self.chg_penalised_lr)):
            if len(rates) != 2 or not all(0 < rate < float("inf") for rate in rates):
                raise ConfigError(f"{name} takes two numbers above 0, the first and the last rate: 0.1,0.01")


@dataclass(frozen=True)
class FittedGates:
    """Gates [r N] of r fits: `plus` with λ > 0 (G⁺), `minus` with λ < 0 (G⁻), heads in the order of `split_gates`.

    `losses` [3 r] are means over the last tenth of the updates of each phase (`PHASES`).
    """

    plus: Tensor
    minus: Tensor
    losses: Tensor
    layout: Layout


def fit_gates(
    checkpoint: Checkpoint, examples: Sequence[Batch], options: CausalHeadGatingOptions, *, tokens: int, seed: int
) -> FittedGates:
    """Fit the gates of all heads to `examples`: batches of one sentence each, with labels.

    A pass has at most `tokens` positions, but at least one sentence for every fit. Deterministic by the seed.
    NumericalError if a loss is not finite.
    """
    assert not checkpoint.two_sided or examples[0].target is not None, "an encoder-decoder needs a target"
    layout = {site_layer: heads for site_layer, heads in checkpoint.layout.items() if heads}
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float64 if checkpoint.dtype is torch.float64 else torch.float32
    start = torch.rand(options.chg_fits, sum(layout.values()), generator=generator, dtype=torch.float64)
    theta = torch.logit(start.clamp(EDGE, 1 - EDGE)).to(checkpoint.device, dtype)
    order = _draw_batches(len(examples), options.chg_batch, generator)
    descent = _Descent(checkpoint, examples, layout, options.chg_steps, tokens, order)
    with eval_mode(checkpoint.model), frozen_parameters(checkpoint.model):
        theta, first = descent.run(theta, theta.new_zeros(options.chg_fits), options.chg_lr)
        pull = theta.new_tensor([options.chg_penalty, -options.chg_penalty]).repeat_interleave(options.chg_fits)
        theta, second = descent.run(theta.repeat(2, 1), pull, options.chg_penalised_lr)
    gates_kept, gates_shed = theta.sigmoid().double().cpu().split(options.chg_fits)
    return FittedGates(gates_kept, gates_shed, torch.cat([first, second]).view(3, options.chg_fits), layout)


def scores(gates: FittedGates) -> dict[str, Tensor]:
    """Facilitation G⁻, interference 1 − G⁺ and irrelevance G⁺ (1 − G⁻) [r N] of every fit (Nam et al., table 1)."""
    return {"facilitation": gates.minus, "interference": 1 - gates.plus, "irrelevance": gates.plus * (1 - gates.minus)}


def gated_losses(checkpoint: Checkpoint, gates: Tensor, batch: Batch, layout: Layout) -> Tensor:
    """The mean -log p of each sentence's labels [r b], under the gates [r N] of every fit."""
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
    """Adam on θ of several independent fits at once, all on the same sentences."""

    checkpoint: Checkpoint
    examples: Sequence[Batch]
    layout: Layout
    steps: int
    tokens: int
    order: Iterator[list[int]]

    def run(self, start: Tensor, pull: Tensor, rates: Sequence[float]) -> tuple[Tensor, Tensor]:
        """θ [r N] after all steps from `start`, with λ [r], and the mean losses [r] of the last tenth of them."""
        theta, steps = start.clone().requires_grad_(), self.steps
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
        """Losses [r] on some sentences, and the gradient [r N] of the objective, clipped to a norm of 1 by fit."""
        total, gradient = theta.new_zeros(len(theta)), torch.zeros_like(theta)
        with torch.enable_grad():
            by_length = sorted((self.examples[number] for number in numbers), key=lambda example: example.positions)
            for alike in groups(by_length, lambda example: example.positions, self.tokens // len(theta)):
                batch = join_batches(alike)
                losses = gated_losses(self.checkpoint, theta.sigmoid(), batch, self.layout).sum(dim=1) / len(numbers)
                gradient += torch.autograd.grad(losses.sum(), theta)[0]
                total += losses.detach()
            penalty = penalize(torch.zeros_like(total), theta, pull)
            gradient += torch.autograd.grad(penalty.sum(), theta)[0]
        if not bool(total.isfinite().all() and gradient.isfinite().all()):
            raise NumericalError(f"the loss of the gates is no number; take a wider {flag.dtype}")
        norm = gradient.norm(dim=-1, keepdim=True)  # [r 1]
        return total.double().cpu(), gradient * (MAX_NORM / (norm + EDGE)).clamp(max=1)


def single_sentences(batches: Iterator[Batch]) -> list[Batch]:
    """Batches of one sentence each, of the sentences that have labels; the label of a prompt is its answer."""
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
    """Join batches of one sentence each into one batch."""
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
    columns = zip(*((side.ids[0], side.real[0], side.special[0]) for side in sides), strict=True)
    ids, real, special = (pad_sequence(list(column), batch_first=True) for column in columns)
    segments = [side.segments[0] for side in sides if side.segments is not None]
    return Side(ids, real, special, pad_sequence(segments, batch_first=True) if segments else None)


def _draw_batches(count: int, batch: int, generator: torch.Generator) -> Iterator[list[int]]:
    """Endless batches of numbers below `count` (all of them if `batch` is more), in a new random order each round."""
    size, waiting = min(batch, count), list[int]()
    while True:
        while len(waiting) < size:
            waiting += torch.randperm(count, generator=generator).tolist()
        yield waiting[:size]
        waiting = waiting[size:]


@analysis
class CausalHeadGating(Analysis):
    """Gates of all heads, fitted to the text with and against removal (Nam et al. 2025).

    With the model frozen, a gate in (0, 1) on each head minimises -log p of the text (of prompts: of the answer), less
    λ times the mean of the gates' logits, clipped at ±4. After a fit with λ = 0 from random gates, G⁺ (λ = 0.1) opens
    every gate that the text does not hold shut, G⁻ (λ = −0.1) shuts every gate that it does not hold open.
    `facilitation` = G⁻, `interference` = 1 − G⁺, `irrelevance` = G⁺ (1 − G⁻); means of ten fits (`chg-fits`),
    intervals over fits.

    Labels `facilitating`, `interfering`: a score of at least 0.5, with evidence over fits (sign test), not over text.
    Hyper-parameters are the paper's; the authors' program uses `chg-lr=1,1 chg-penalised-lr=1,1 chg-batch=32`.
    Gradients are clipped per fit. Needs a language-model head or a target.
    """

    name = "causal_head_gating"
    order = 302
    default = False
    sampled = True
    passes = frozenset()
    summary = "gates fitted with and against removal: heads that help, that are in the way, and neither"
    measures = (
        Measure("facilitation", "gate held open (G⁻)", range=(0, 1), keep="highest", why="the text goes without them"),
        Measure(
            "interference",
            "gate held shut (1 − G⁺)",
            range=(0, 1),
            keep="lowest",
            why="the text is likelier without them",
        ),
        Measure("irrelevance", "gate held by nothing (G⁺(1 − G⁻))", range=(0, 1)),
    )
    functions = (
        HeadFunction("facilitating", "⊕", "F", "#117733", "the model needs it for this text", order=16),
        HeadFunction("interfering", "⊗", "N", "#cc3311", "this text is likelier without it", order=17),
    )
    Options = CausalHeadGatingOptions
    signature_entry = (
        "gates:{chg_fits}x{chg_steps}x{chg_batch},lr={chg_lr[0]:g}>{chg_lr[1]:g}/{chg_penalised_lr[0]:g}>"
        "{chg_penalised_lr[1]:g},penalty={chg_penalty:g}"
    )

    gates: FittedGates
    n_truncated: int

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.predicts != "words" or not checkpoint.decodes:
            return "needs a decoder that predicts words (one with a language-model head)"
        return None

    def read(self, corpus: Corpus) -> None:
        checkpoint, options, batching = self.checkpoint, self.options, self.run.batching
        if checkpoint.two_sided and not corpus.has_target:
            raise ConfigError(f"causal_head_gating needs a {flag.target}; give one, or leave it out")
        omissions, first = Omissions(), corpus.first(2 * options.chg_steps * options.chg_batch)
        sizes = {"tokens": batching.tokens, "limit": sentence_limit(checkpoint, batching.limit)}
        stream = batches(first, checkpoint, **sizes, long=batching.long, omissions=omissions, labels=True)
        examples = single_sentences(stream)
        if not examples:
            raise DataError(f"{corpus.name} has no token that a model could predict; causal_head_gating needs some")
        self.n_truncated = omissions.n_truncated
        self.gates = fit_gates(checkpoint, examples, options, tokens=batching.tokens, seed=self.run.seed)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = AnalysisReport(), LabelTests(min_instances=0)
        for name, values in scores(self.gates).items():
            estimates: dict[SiteLayer, Estimate] = {}
            for site_layer, part in split_gates(values, self.gates.layout).items():
                estimates[site_layer] = aggregates.bootstrap.over_units(part, torch.ones(len(part), 1))
                if name in LABELS:
                    p = bdtrc((part >= THRESHOLD).sum(dim=0).numpy() - 1.0, len(part), 0.5)
                    about: dict[str, Any] = {"threshold": THRESHOLD, "counts": None}
                    about["rate"] = Rate(f"of 1 as its {name}, mean of {len(part)} fits")
                    tests.add(site_layer, name, LABELS[name], estimates[site_layer], p, **about)
            report.columns[name] = estimates
        tests.conclude(report)
        report.tables["causal_head_gating"] = _table(self.gates)
        losses = zip(PHASES, self.gates.losses.tolist(), strict=True)
        report.tables["causal_head_gating_loss"] = pd.DataFrame(
            {"fit": fit, "phase": phase, "loss": loss} for phase, of_fits in losses for fit, loss in enumerate(of_fits)
        )
        if self.n_truncated:
            report.remarks.append(f"causal_head_gating: {self.n_truncated} sentences were cut ({flag.max_length})")
        return report


def _table(gates: FittedGates) -> pd.DataFrame:
    keep_gates, shed_gates = split_gates(gates.plus, gates.layout), split_gates(gates.minus, gates.layout)
    return head_table(
        {
            site_layer: {
                "kept": keep_gates[site_layer].mean(dim=0),
                "shed": shed_gates[site_layer].mean(dim=0),
                "facilitating_share": (shed_gates[site_layer] >= THRESHOLD).double().mean(dim=0),
                "interfering_share": (1 - keep_gates[site_layer] >= THRESHOLD).double().mean(dim=0),
            }
            for site_layer in keep_gates
        }
    )
