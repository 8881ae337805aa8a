"""Contribution: norms of the projected values that a head moves (Kobayashi et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from headscope.attribution.residual_stream import output_slices
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.attention import precise, repeat_groups


@analysis
class Contribution(Analysis):
    """Mean over queries of Σ_s w_ts ‖f(x_s)‖, f(x) = (x W_V + b_V) W_O of the head (Kobayashi et al. 2020).

    `contribution_sum` is ‖Σ_s w_ts f(x_s)‖: less where keys cancel. Special tokens are no queries; the sums run over
    all visible keys. Without the output bias and what follows it; linear mixing is folded into W_O.
    """

    name = "contribution"
    reads = "rows"
    group = "importance"
    order = 203
    default = False
    summary = "norm of the vectors that a head writes (Kobayashi et al. 2020)"
    measures = (
        Measure(
            "contribution",
            "contribution",
            range=(0, None),
            keep="highest",
            why="the vectors that they write are the shortest",
            within_layer=True,
        ),
        Measure(
            "contribution_sum",
            "summed contribution",
            range=(0, None),
            keep="highest",
            why="the sums of what they write are the shortest",
            within_layer=True,
        ),
    )

    grams: dict[tuple[Site, int], Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        for (site, layer), matrices in output_slices(checkpoint).items():
            if isinstance(matrices, str):
                return f"{site}.{layer}: {matrices}"
        return None

    def inspect(self, checkpoint: Checkpoint) -> None:
        slices = {place: precise(cast(Tensor, matrices)) for place, matrices in output_slices(checkpoint).items()}
        self.grams = {place: output @ output.transpose(1, 2) for place, output in slices.items()}  # [h k k]

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        gram = self.grams[heads.site, heads.layer]
        name = f"norms of values/{heads.site}/{heads.layer}"  # the same for every block of queries
        value_norms = heads.of_batch.get(
            name, heads.batch, lambda: norms(repeat_groups(heads.value.to(gram.dtype), len(gram)), gram)
        )  # [b h s]
        weighted_norms = torch.einsum("bhts,bhs->bht", heads.weights, value_norms)
        return {
            "contribution": heads.over_queries(weighted_norms),
            "contribution_sum": heads.over_queries(norms(heads.context, gram)),
        }


def norms(vectors: Tensor, gram: Tensor) -> Tensor:
    """‖vector · W_O‖ [b h n] of vectors [b h n k], from gram [h k k] = W_O W_Oᵀ of each head."""
    return torch.einsum("bhnk,bhnk->bhn", vectors @ gram, vectors).clamp(min=0).sqrt()
