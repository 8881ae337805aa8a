"""Ablation of heads: the change of the objective when a head is closed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from headscope.attribution.gatevector import ablation, explained_batch
from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.data.encoded import Batch
from headscope.engine.base import Analysis, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers


@dataclass(frozen=True)
class AblationOptions:
    """Options of `ablation`."""

    ablate_with: Literal["zero", "mean", "resample"] = option(
        "zero", "What an ablated head gives: nothing, its mean over the sentence, its context of another position."
    )


@analysis
class Ablation(Analysis):
    """The objective's damage when one head is taken out and all others stay (captum's FeatureAblation over gates).

    Positive: the head matters. For `loss` the rise of -log p in nats per predicted token; for `top1` the fall of the
    intact model's largest logits, per position; for `log-probability` the fall of log p, per sentence; for
    `representation` the cosine distance to the intact vector, 1 − cos, which is never negative. A head that is
    taken out gives nothing (`--ablate-with zero`), its mean over the sentence (`mean`), or what it gave at another
    position of the sentence (`resample`): see `headscope.attribution.gatevector`. Gates act after mixing.
    """

    name = "ablation"
    reads = "contexts"
    group = "importance"
    order = 210
    default = False
    many_passes = True
    needs = frozenset({"objective"})
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
    layer_index: LayerIndex | None = None

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.layer_index = resumable_layers(checkpoint.model)

    def explain(self, checkpoint: Checkpoint, batch: Batch) -> Mapping[tuple[str, Site, int], Ratio]:
        with (
            torch.inference_mode(),
            explained_batch(
                checkpoint, self.objective, batch, layer_index=self.layer_index, ablate_with=self.options.ablate_with
            ) as explained,
        ):
            return explained.ratios("ablation", ablation(explained.f, explained.gates, tick=self.tick))

    def signature(self) -> dict[str, str]:
        return {"with": self.options.ablate_with}
