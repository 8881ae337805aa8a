"""Norms of each head's parameters, and of the vectors that it writes (Kobayashi et al. 2020)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor

from headscope.attribution.residual_stream import output_slices
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_table
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.model.attention import precise, repeat_groups
from headscope.model.projections import Slices


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

    grams: dict[SiteLayer, Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        for (site, layer), matrices in output_slices(checkpoint).items():
            if isinstance(matrices, str):
                return f"{site}.{layer}: {matrices}"
        return None

    def inspect(self, checkpoint: Checkpoint) -> None:
        slices = {
            site_layer: precise(cast(Tensor, matrices)) for site_layer, matrices in output_slices(checkpoint).items()
        }
        self.grams = {site_layer: output @ output.transpose(1, 2) for site_layer, output in slices.items()}  # [h k k]

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


MATRICES = (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))


@analysis
class Magnitude(Analysis):
    """Frobenius norms of a head's slices: `magnitude` of W_O, `magnitude_all` the product of all four.

    Without biases; heads of a group share W_K and W_V. The product does not change when W_O is scaled up and W_V down.
    Exact: low = high = value.
    """

    name = "magnitude"
    group = "importance"
    order = 202
    default = False
    passes = frozenset()
    summary = "norm of a head's slice of W_O, and product of the norms of all four slices"
    measures = (
        Measure(
            "magnitude", "norm of W_O", range=(0, None), keep="highest", why="their slices of W_O are the smallest"
        ),
        Measure(
            "magnitude_all",
            "norms of all four slices",
            range=(0, None),
            keep="highest",
            why="the slices of their four matrices are the smallest",
        ),
    )

    norms: dict[SiteLayer, dict[str, Tensor]]

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.norms = {
            site_layer: {
                f"norm_{letter}": _norms(getattr(of, name), checkpoint.layout[site_layer]) for letter, name in MATRICES
            }
            for site_layer, of in checkpoint.projections.items()
        }
        for site_layer, norms in self.norms.items():
            product = torch.stack([*norms.values()]).prod(dim=0)
            self.exact[site_layer] = {"magnitude": norms["norm_o"], "magnitude_all": product}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        report.tables["magnitude"] = head_table(self.norms)
        return report


def _norms(slices: Slices | None, heads: int) -> Tensor:
    if slices is None:
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    norms: Tensor = slices.matrices().cpu().double().flatten(1).norm(dim=-1)
    return norms.repeat_interleave(heads // len(slices.units), dim=0)
