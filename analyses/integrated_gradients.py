"""Integrated gradients of the objective along the path from all heads closed to all heads open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headscope.attribution.gatevector import explained_batch, integrated_gradients
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, RunOptions, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site

COMPLETE = 0.01  # a gap of more than this share of the whole is pointed out
USELESS = 0.5  # beyond this values say little


@dataclass(frozen=True)
class IntegratedGradientsOptions:
    """Options of `integrated_gradients`."""

    ig_steps: int = option(16, "Points of `integrated_gradients`.", metavar="N", minimum=1, maximum=1000)


@analysis
class IntegratedGradients(Analysis):
    """Integrated gradients over the gates of all heads, from 0 to 1 (Sundararajan et al. 2017; captum).

    ∫ ∂f/∂gate while all gates open together, by `ig-steps` Gauss–Legendre points; f is the objective, positive where
    the head helps. Values add up to f(all) − f(none) but for a reported gap, which is large where a norm follows the
    sum of heads (Gemma 3, OLMo 2): take `shapley` there.
    """

    name = "integrated_gradients"
    reads = "contexts"
    group = "importance"
    order = 230
    default = False
    many_passes = True
    needs = frozenset({"objective"})
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

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.difference = self.gap = 0.0

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        with explained_batch(checkpoint, self.objective, batch, layer_index=None, of="value") as explained:
            values, gap = integrated_gradients(
                explained.f, explained.gates, steps=self.options.ig_steps, tick=self.tick
            )
            self.gap += float(gap.double().abs().sum())
            self.difference += float((values.sum(dim=-1) - gap).double().abs().sum())
            return explained.ratios("integrated_gradients", values)

    def state(self) -> tuple[float, float]:
        return self.difference, self.gap

    def add_state(self, state: tuple[float, float]) -> None:
        self.difference, self.gap = self.difference + state[0], self.gap + state[1]

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        share = self.gap / self.difference if self.difference else 0.0
        text = f"integrated_gradients: {self.options.ig_steps} steps leave a gap of {share:.1%} of f(all) − f(none)"
        text += "; raise --ig-steps" if share > COMPLETE else ""
        if share > USELESS:
            text += (
                ", many times over, or take shapley: the values say little, as f changes within little of the way "
                "(a norm on what heads write makes it so, as in Gemma 3)"
            )
        report.remarks.append(text)
        return report

    def signature(self) -> dict[str, str]:
        return {"steps": str(self.options.ig_steps)}
