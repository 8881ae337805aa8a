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
    """The objective's damage when one head is off and all others stay.

    Positive: the model needs the head. `loss`: rise of -log p in nats per predicted token; `top1`: fall of the intact
    model's largest logits, per position; `log-probability`: fall of log p, per sentence; `representation`: 1 − cos to
    the intact vector. The head's context becomes zero, its mean over the sentence (`ablate-with=mean`) or its context
    at another position (`resample`), after mixing.

    `--importance` measures it within 30 forward passes of the text (`ablation-passes`), on a part of the sentences
    where these are too few; by name, or with `--importance all`, on all of them.
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
