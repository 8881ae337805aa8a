"""The attention of whole layers."""

from __future__ import annotations

from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.heads import HeadId
from headscope.pruning.closed_form.moments import ContextMoments
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.ranking.criterion import Criterion, ScoringContext, criterion
from headscope.pruning.ranking.scoring import for_all_heads, moments_of, reached_modules


@criterion
class LayerDrop(Criterion):
    """Layer after layer, those first whose attention writes least: the baseline of dropping attention altogether.

    A layer is judged by E‖W (x − μ)‖², what the residual stream loses where its bias takes over the mean (without a
    bias E‖W x‖²); layers write into the same stream, so that is compared as it is. He et al. 2024 (2406.15786,
    Attention Drop) judge by the cosine of the stream before and after. Where a size ends within a layer, its heads go
    by the same measure of their own columns. The score is the sum over all heads that go up to this one, of a layer
    in equal parts.
    """

    name = "layer-drop"
    summary = "energy of the whole layer's attention around its mean: layer after layer goes"
    why = "whole layers of attention go, the least energy first"
    changes = False

    def scores(self, context: ScoringContext) -> Scores:
        layers = [
            (float(energy(projection, sums, projection.blocks.flatten())), projection, sums)
            for projection, sums in reached_modules(context, moments_of(context))
        ]
        total, scores = 0.0, dict[HeadId, float]()
        for layer, projection, sums in sorted(layers, key=lambda of_layer: of_layer[0]):
            of_units = [float(energy(projection, sums, columns)) for columns in projection.blocks]
            for _, unit in sorted(zip(of_units, projection.units, strict=True)):
                total += layer / len(projection.units)
                scores.update(dict.fromkeys(unit, total))
        return for_all_heads(context, scores)


def energy(projection: OutputProjection, moments: ContextMoments, columns: Tensor) -> Tensor:
    """tr(W_G C_GG W_Gᵀ) of columns G, with second moments where no bias takes over the mean."""
    second = moments.covariance if projection.has_bias else moments.second
    weight = projection.weight[:, columns]
    return ((weight @ second[columns][:, columns]) * weight).sum()
