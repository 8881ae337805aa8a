"""Causal Head Gating: heads that help a model say a text, that are in the way, and neither (Nam et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
import torch
from scipy.special import bdtrc

from headscope.attribution.fitted_gates import FittedGates, GatingFit, fit_gates, scores, single_sentences
from headscope.attribution.gatevector import split_gates
from headscope.bootstrap import Estimate
from headscope.config import option
from headscope.config.declarations import HeadFunction, Measure
from headscope.data.batching import Omissions, batches, sentence_limit
from headscope.data.corpus import Corpus
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, RunOptions, analysis, head_table
from headscope.engine.evidence.labels import LabelTests, Rate
from headscope.errors import ConfigError, DataError, flag
from headscope.formats.base import Checkpoint
from headscope.heads import Site

PANEL = "Causal head gating"
THRESHOLD = 0.5
LABELS = {"facilitation": "facilitating", "interference": "interfering"}
PHASES = ("without penalty", "kept", "shed")


@dataclass(frozen=True)
class CausalHeadGatingOptions:
    """Options of `causal_head_gating`."""

    chg_fits: int = option(
        10, "Fits from random starts; a label needs five or more.", metavar="N", panel=PANEL, minimum=1
    )
    chg_steps: int = option(500, "Updates of each of the three phases of a fit.", metavar="N", panel=PANEL, minimum=1)
    chg_batch: int = option(64, "Sentences of an update.", metavar="N", panel=PANEL, minimum=1)
    chg_lr: tuple[float, ...] = option(
        (0.1, 0.01),
        "Learning rate without penalty, at the beginning and at the end.",
        metavar="NUMBER,NUMBER",
        panel=PANEL,
    )
    chg_penalised_lr: tuple[float, ...] = option(
        (0.5, 0.1), "The same with penalty.", metavar="NUMBER,NUMBER", panel=PANEL
    )
    chg_penalty: float = option(
        0.1, "Weight of the mean logit of all gates in the loss.", metavar="NUMBER", panel=PANEL, minimum=0
    )

    def __post_init__(self) -> None:
        for name, rates in ((flag.chg_lr, self.chg_lr), (flag.chg_penalised_lr, self.chg_penalised_lr)):
            if len(rates) != 2 or not all(0 < rate < float("inf") for rate in rates):
                raise ConfigError(f"{name} takes two numbers above 0, the first and the last rate: 0.1,0.01")


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

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.gates: FittedGates | None = None
        self.truncated = 0

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        if checkpoint.predicts != "words" or not checkpoint.decodes:
            return "needs a decoder that predicts words (one with a language-model head)"
        return None

    def read(self, corpus: Corpus) -> None:
        checkpoint, options, batching = self.checkpoint, self.options, self.run.batching
        if checkpoint.two_sided and not corpus.has_target:
            raise ConfigError(f"causal_head_gating needs a {flag.target}; give one, or leave it out")
        losses = Omissions()
        examples = single_sentences(
            batches(
                corpus.first(2 * options.chg_steps * options.chg_batch),
                checkpoint,
                tokens=batching.tokens,
                limit=sentence_limit(checkpoint, batching.limit),
                long=batching.long,
                losses=losses,
                labels=True,
            )
        )
        if not examples:
            raise DataError(f"{corpus.name} has no token that a model could predict; causal_head_gating needs some")
        self.n_truncated = losses.n_truncated
        fit = GatingFit(
            fits=options.chg_fits,
            steps=options.chg_steps,
            batch=options.chg_batch,
            rates=options.chg_lr,
            penalised_rates=options.chg_penalised_lr,
            penalty=options.chg_penalty,
            tokens=batching.tokens,
            seed=self.run.seed,
        )
        self.gates = fit_gates(checkpoint, examples, fit)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        assert self.gates is not None
        report, tests = AnalysisReport(), LabelTests(min_instances=0)
        for name, values in scores(self.gates).items():
            estimates: dict[tuple[Site, int], Estimate] = {}
            for place, part in split_gates(values, self.gates.layout).items():
                estimates[place] = aggregates.bootstrap.over_units(part, torch.ones(len(part), 1))
                if name in LABELS:
                    p = bdtrc((part >= THRESHOLD).sum(dim=0).numpy() - 1.0, len(part), 0.5)
                    rate = Rate(f"of 1 as its {name}, mean of {len(part)} fits")
                    tests.add(
                        place, name, LABELS[name], estimates[place], p, threshold=THRESHOLD, counts=None, rate=rate
                    )
            report.columns[name] = estimates
        tests.conclude(report)
        report.tables["causal_head_gating"] = _table(self.gates)
        report.tables["causal_head_gating_loss"] = pd.DataFrame(
            [
                {"fit": fit, "phase": phase, "loss": loss}
                for phase, losses in zip(PHASES, self.gates.losses.tolist(), strict=True)
                for fit, loss in enumerate(losses)
            ]
        )
        if self.truncated:
            report.remarks.append(f"causal_head_gating: {self.truncated} sentences were cut ({flag.max_length})")
        return report


def _table(gates: FittedGates) -> pd.DataFrame:
    keep_gates, shed_gates = split_gates(gates.plus, gates.layout), split_gates(gates.minus, gates.layout)
    return head_table(
        {
            place: {
                "kept": keep_gates[place].mean(dim=0),
                "shed": shed_gates[place].mean(dim=0),
                "facilitating_share": (shed_gates[place] >= THRESHOLD).double().mean(dim=0),
                "interfering_share": (1 - keep_gates[place] >= THRESHOLD).double().mean(dim=0),
            }
            for place in keep_gates
        }
    )
