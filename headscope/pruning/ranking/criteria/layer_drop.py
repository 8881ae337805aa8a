"""The attention of whole layers."""

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
    """Layer after layer, those first whose attention turns the residual stream least (He et al. 2024, LLM-Drop).

    A layer is judged by 1 − E cos(x, x + y) over tokens: x [d] is the residual stream that its attention reads, y what
    it adds. Where W_O has a bias, that takes over the mean of y: x + E y stands for x. Where a size ends within a
    layer, its heads go by the same measure of their own part of y. The score is the sum over all heads that go up to
    this one, of a layer in equal parts. ConfigError where the stream cannot be told (y goes through a norm first).
    """

    name = "layer-drop"
    summary = "how far the layer's attention turns the residual stream: layer after layer goes (LLM-Drop)"
    why = "whole layers of attention go, those first that turn the residual stream least"
    changes = False

    def scores(self, context: ScoringContext) -> Scores:
        modules = list(reached_modules(context, moments_of(context)))
        turnings = {place: _Turning(projection, sums) for projection, sums in modules for place in projection.places}
        for place, contexts, output, stream in module_calls(
            context.checkpoint, text_batches(context.checkpoint, context.text, context.batching)
        ):
            if stream is None:
                name = f"{place[0]}.{place[1]}"
                raise ConfigError(f"{flag.by} layer-drop: the stream of {name} cannot be told; rank by obs or flap")
            if place in turnings:
                turnings[place].add(contexts, output + stream)
        layers = list[tuple[list[float], OutputProjection]]()
        for module, _ in modules:
            shares = [turnings[place].total / turnings[place].tokens for place in module.places]
            layers.append((torch.stack(shares).sum(dim=0).tolist(), module))
        total, scores = 0.0, dict[HeadId, float]()
        for (layer, *of_units), projection in sorted(layers, key=lambda module: module[0][0]):
            for _, unit in sorted(zip(of_units, projection.units, strict=True)):
                total += layer / len(projection.units)
                scores.update(dict.fromkeys(unit, total))
        return for_all_heads(context, scores)


class _Turning:
    """1 − E cos(h − p, h) over tokens, h the stream after the module, p its output or that of one unit, less its mean.

    Without a bias p is not centred.
    """

    def __init__(self, projection: OutputProjection, sums: ContextMoments) -> None:
        columns, weight = [projection.blocks.flatten(), *projection.blocks], projection.weight
        self.parts = [(part, weight[:, part]) for part in columns]
        self.mean = sums.mean if projection.has_bias else torch.zeros_like(sums.mean)
        self.total, self.tokens = torch.zeros(len(columns), dtype=torch.float64), 0

    def add(self, contexts: Tensor, after: Tensor) -> None:
        """Take in contexts [n m] and the stream after the module [n d]."""
        contexts, after = (contexts.cpu() - self.mean), after.cpu()
        for number, (columns, weight) in enumerate(self.parts):
            stream_without = after - contexts[:, columns] @ weight.T
            self.total[number] += float((1 - torch.cosine_similarity(stream_without, after, dim=1, eps=1e-300)).sum())
        self.tokens += len(after)
