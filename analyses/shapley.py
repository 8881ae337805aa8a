"""Shapley values of heads: the mean effect of adding a head to a random set of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headscope.attribution.gatevector import explained_batch, shapley
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.base import Analysis, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers


@dataclass(frozen=True)
class ShapleyOptions:
    """Options of `shapley`."""

    shapley_samples: int = option(
        25, "Random orders of all heads for `shapley`.", metavar="N", minimum=1, maximum=100_000
    )


@analysis
class Shapley(Analysis):
    """Shapley values of heads from random orders (Castro et al. 2009; captum's ShapleyValueSampling).

    Heads are opened one by one from none, and each is worth what the objective gains; mean over `shapley-samples`
    orders, the same for all sentences. Values add up to the damage of all heads off, in the units of `ablation`. The
    interval covers sentences, not orders.
    """

    name = "shapley"
    reads = "contexts"
    group = "importance"
    order = 220
    default = False
    many_passes = True
    sampled = True
    needs = frozenset({"objective"})
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
    layer_index: LayerIndex | None = None

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.layer_index = resumable_layers(checkpoint.model)

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        samples, seed = self.options.shapley_samples, self.run.seed
        with (
            torch.inference_mode(),
            explained_batch(checkpoint, self.objective, batch, layer_index=self.layer_index, keep="last") as explained,
        ):
            values = shapley(explained.f, explained.gates, samples=samples, seed=seed, tick=self.tick)
            return explained.ratios("shapley", values)

    def signature(self) -> dict[str, str]:
        return {"samples": str(self.options.shapley_samples)}
