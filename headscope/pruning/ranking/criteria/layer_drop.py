"""Attention of whole layers, removed layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError, flag
from headscope.heads import HeadId
from headscope.pruning.closed_form.moments import ContextMoments, text_batches
from headscope.pruning.closed_form.output_projections import OutputProjection
from headscope.pruning.closed_form.sequential import module_calls
from headscope.pruning.ranking.criterion import (
    Criterion,
    ScoringContext,
    criterion,
    for_all_heads,
    moments_of,
    reached_modules,
)


@criterion
class LayerDrop(Criterion):
    """Whole layers of attention are removed one after another, first those that turn the residual stream least.

    A layer is measured by 1 − E cos(x, x + y) over tokens: x [d] is the residual stream to which its attention adds y
    (He et al. 2024, LLM-Drop). If W_O has a bias, which can replace the mean of y, x + E y is used instead of x. Heads
    within a layer are ordered by the same measure of their part of y. Each head of a layer adds an equal part of the
    layer's measure, and the score of a head is the sum up to it. ConfigError where the stream cannot be told (y goes
    through a norm first).
    """

    name = "layer-drop"
    summary = "how far the layer's attention turns the residual stream: layer after layer goes (LLM-Drop)"
    why = "whole layers of attention go, those first that turn the residual stream least"
    changes = False

    def scores(self, context: ScoringContext) -> Scores:
        modules = list(reached_modules(context, moments_of(context)))
        meters = {
            site_layer: _TurningMeter(projection, sums)
            for projection, sums in modules
            for site_layer in projection.site_layers
        }
        for site_layer, contexts, output, stream in module_calls(
            context.checkpoint, text_batches(context.checkpoint, context.text, context.batching)
        ):
            if stream is None:
                name = f"{site_layer[0]}.{site_layer[1]}"
                raise ConfigError(f"{flag.by} layer-drop: the stream of {name} cannot be told; rank by obs or flap")
            if site_layer in meters:
                meters[site_layer].add(contexts, output + stream)
        layers = list[tuple[list[float], OutputProjection]]()
        for projection, _ in modules:
            means = [meters[site_layer].total / meters[site_layer].tokens for site_layer in projection.site_layers]
            layers.append((torch.stack(means).sum(dim=0).tolist(), projection))
        total, scores = 0.0, dict[HeadId, float]()
        for (layer_value, *unit_values), projection in sorted(layers, key=lambda layer: layer[0][0]):
            for _, unit in sorted(zip(unit_values, projection.units, strict=True)):
                total += layer_value / len(projection.units)
                scores.update(dict.fromkeys(unit, total))
        return for_all_heads(context, scores)


class _TurningMeter:
    """Σ 1 − cos(h − p, h) over tokens [1 + u], with h the stream after a module.

    p is the module's output in the first entry, and the part of each unit in the others; centred if W_O has a bias.
    """

    def __init__(self, projection: OutputProjection, sums: ContextMoments) -> None:
        columns, weight = [projection.blocks.flatten(), *projection.blocks], projection.weight
        self.parts = [(part, weight[:, part]) for part in columns]
        self.mean = sums.mean if projection.has_bias else torch.zeros_like(sums.mean)
        self.total, self.tokens = torch.zeros(len(columns), dtype=torch.float64), 0

    def add(self, contexts: Tensor, after: Tensor) -> None:
        """Add contexts [n m] and the stream after the module [n d]."""
        contexts, after = (contexts.cpu() - self.mean), after.cpu()
        for number, (columns, weight) in enumerate(self.parts):
            stream_without = after - contexts[:, columns] @ weight.T
            self.total[number] += float((1 - torch.cosine_similarity(stream_without, after, dim=1, eps=1e-300)).sum())
        self.tokens += len(after)
