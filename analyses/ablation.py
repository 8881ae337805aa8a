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
from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch
from headscope.engine.base import Analysis, analysis
from headscope.engine.budget import affordable
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.prefix_cache import LayerIndex, resumable_layers


@dataclass(frozen=True)
class AblationOptions:
    """Options of `ablation`."""

    ablate_with: Literal["zero", "mean", "resample"] = option(
        "zero", "What an ablated head gives: nothing, its mean over the sentence, its context of another position."
    )
    ablation_passes: int | None = option(
        None,
        "Forward passes of the text that heads off may take, on as many of its sentences as that allows; 0: on all. "
        "Default: 30 with --importance, on all where ablation is asked for by name or with --importance all.",
        metavar="N",
        minimum=0,
    )


@analysis
class Ablation(Analysis):
    """The objective's damage when one head is taken out and all others stay (captum's FeatureAblation over gates).

    Positive: the head matters. For `loss` the rise of -log p in nats per predicted token; for `top1` the fall of the
    intact model's largest logits, per position; for `log-probability` the fall of log p, per sentence; for
    `representation` the cosine distance to the intact vector, 1 − cos, which is never negative. A head that is
    taken out gives nothing (`--ablate-with zero`), its mean over the sentence (`mean`), or what it gave at another
    position of the sentence (`resample`): see `headscope.attribution.gatevector`. Gates act after mixing.

    `--importance` measures it within a budget (`--ablation-passes`) of 30 forward passes of the text: on all sentences
    or on a part of them, which is drawn once for all runs. Signatures then say `ablation-n:64 of 240`. Asked for by
    name, or with `--importance all`, it is of all sentences. A pass without a head costs the layers from that head on.
    """

    name = "ablation"
    reads = "contexts"
    group = "importance"
    order = 210
    default = False
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
    passes_needed = 1.0

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.layer_index = index = resumable_layers(checkpoint.model)
        layout = {layer: heads for layer, heads in checkpoint.layout.items() if heads}
        self.passes_needed += sum(heads * (index.above([layer]) if index else 1) for layer, heads in layout.items())

    def sample(self, corpus: Corpus) -> Corpus | str:
        return affordable(corpus, self.passes_needed, self.options.ablation_passes or 0)

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
