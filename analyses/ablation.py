"""Importance by removal: one head at a time, over random orders (Shapley), and along the path to none."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headscope.attribution.gatevector import GatedBatch, ablation, explained_batch, integrated_gradients, shapley
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.engine.joint import affordable
from headscope.errors import flag
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers

COMPLETE = 0.01  # a remark advises more steps for a larger gap, as a share of f(all) − f(none)
USELESS = 0.5  # share of the gap beyond which values say little


class _OfGates(Analysis):
    reads = "contexts"
    group = "importance"
    default = False
    needs = frozenset({"objective"})
    layer_index: LayerIndex | None = None

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.layer_index = resumable_layers(checkpoint.model)

    def gated(self, checkpoint: Checkpoint, batch: Batch, **options: Any) -> AbstractContextManager[GatedBatch]:
        """Within the block the objective as a function of gates."""
        return explained_batch(checkpoint, self.objective, batch, layer_index=self.layer_index, **options)


@dataclass(frozen=True)
class AblationOptions:
    """Options of `ablation`."""

    ablate_with: Literal["zero", "mean", "resample"] = option(
        "zero", "What an ablated head gives: nothing, its mean over the sentence, its context of another position."
    )
    ablation_passes: int | None = option(
        None, "Passes that heads off may take, 0: all; default: 30 with --importance, else all.", metavar="N", minimum=0
    )


@analysis
class Ablation(_OfGates):
    """The objective's damage when one head is off and all others stay.

    Positive: the model needs the head. `loss`: rise of -log p in nats per predicted token; `top1`: fall of the intact
    model's largest logits, per position; `log-probability`: fall of log p, per sentence; `representation`: 1 − cos to
    the intact vector. The head's context becomes zero, its mean over the sentence (`ablate-with=mean`) or its context
    at another position (`resample`), after mixing.

    `--importance` measures it within 30 forward passes of the text (`ablation-passes`), on a part of the sentences
    where these are too few; by name, or with `--importance all`, on all of them.
    """

    name = "ablation"
    order = 210
    summary = "how much worse the objective gets without the head"
    measures = (
        Measure(
            "ablation",
            "ablation",
            signed=True,
            overview=5,
            keep="highest",
            why="the objective suffers least without them, one at a time",
        ),
    )
    Options = AblationOptions
    signature_entry = "with:{ablate_with}"
    passes_needed = 1.0

    def inspect(self, checkpoint: Checkpoint) -> None:
        super().inspect(checkpoint)
        index = self.layer_index
        layout = {layer: heads for layer, heads in checkpoint.layout.items() if heads}
        self.passes_needed += sum(heads * (index.above([layer]) if index else 1) for layer, heads in layout.items())

    def sample(self, corpus: Corpus) -> Corpus | str:
        return affordable(corpus, self.passes_needed, self.options.ablation_passes or 0)

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        with torch.inference_mode(), self.gated(checkpoint, batch, ablate_with=self.options.ablate_with) as f:
            return f.ratios("ablation", ablation(f, f.gates, tick=self.tick))


@dataclass(frozen=True)
class ShapleyOptions:
    """Options of `shapley`."""

    shapley_samples: int = option(
        25, "Random orders of all heads for `shapley`.", metavar="N", minimum=1, maximum=100_000
    )


@analysis
class Shapley(_OfGates):
    """Shapley values of heads from random orders (Castro et al. 2009; captum's ShapleyValueSampling).

    Heads are opened one by one from none, and each is worth what the objective gains; mean over `shapley-samples`
    orders, the same for all sentences. Values add up to the damage of all heads off, in the units of `ablation`. The
    interval covers sentences, not orders.
    """

    name = "shapley"
    order = 220
    many_passes = True
    sampled = True
    summary = "Shapley value: mean gain by the head over random orders of all heads"
    measures = (
        Measure(
            "shapley",
            "Shapley value",
            signed=True,
            keep="highest",
            why="they add least to the objective (Castro et al. 2009)",
        ),
    )
    Options = ShapleyOptions
    signature_entry = "samples:{shapley_samples}"

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        samples, seed = self.options.shapley_samples, self.run.seed
        with torch.inference_mode(), self.gated(checkpoint, batch, keep="last") as f:
            return f.ratios("shapley", shapley(f, f.gates, samples=samples, seed=seed, tick=self.tick))


@dataclass(frozen=True)
class IntegratedGradientsOptions:
    """Options of `integrated_gradients`."""

    ig_steps: int = option(16, "Points of `integrated_gradients`.", metavar="N", minimum=1, maximum=1000)


@analysis
class IntegratedGradients(_OfGates):
    """Integrated gradients over the gates of all heads, from 0 to 1 (Sundararajan et al. 2017; captum).

    ∫ ∂f/∂gate while all gates open together, by `ig-steps` Gauss–Legendre points; f is the objective, positive where
    the head helps. Values add up to f(all) − f(none) but for a reported gap, which is large where a norm follows the
    sum of heads (Gemma 3, OLMo 2): take `shapley` there.
    """

    name = "integrated_gradients"
    order = 230
    many_passes = True
    summary = "gradient of the objective by the head's gate, integrated from no heads to all"
    measures = (
        Measure(
            "integrated_gradients",
            "integrated gradients",
            signed=True,
            keep="highest",
            why="they add least to the objective",
        ),
    )
    Options = IntegratedGradientsOptions
    signature_entry = "steps:{ig_steps}"
    merges = ("difference", "gap")
    difference = gap = 0.0

    def inspect(self, checkpoint: Checkpoint) -> None:
        """No layer index: gates of all heads change in every pass, so none resumes from an earlier one."""

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        with self.gated(checkpoint, batch, of="value") as f:
            values, gap = integrated_gradients(f, f.gates, steps=self.options.ig_steps, tick=self.tick)
            self.gap += float(gap.double().abs().sum())
            self.difference += float((values.sum(dim=-1) - gap).double().abs().sum())
            return f.ratios("integrated_gradients", values)

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        share = self.gap / self.difference if self.difference else 0.0
        text = f"integrated_gradients: {self.options.ig_steps} steps leave a gap of {share:.1%} of f(all) − f(none)"
        text += f"; raise {flag.ig_steps}" if share > COMPLETE else ""
        if share > USELESS:
            text += (
                ", many times over, or take shapley: the values say little, as f changes within little of the way "
                "(a norm on what heads write makes it so, as in Gemma 3)"
            )
        report.remarks.append(text)
        return report
