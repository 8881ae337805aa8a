"""Error of the layer's output after a refit (optimal brain surgeon)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headscope.data.encoded import Batch
from headscope.engine.faithfulness.orders import Scores
from headscope.formats.base import Checkpoint
from headscope.heads import SiteLayer
from headscope.pruning.closed_form.damage import MAX_SENTENCES
from headscope.pruning.closed_form.moments import text_batches
from headscope.pruning.closed_form.sequential import module_calls
from headscope.pruning.ranking.criterion import (
    Criterion,
    ScoringContext,
    criterion,
    cumulative_scores,
    moments_of,
    reached_modules,
)


@criterion
class OptimalBrainSurgeon(Criterion):
    """Heads whose part of the layer's output the others cannot replace stay (block optimal brain surgeon).

    The squared error of a module's output after W_O is refitted without the head (Hassibi and Stork 1993 for blocks),
    times E 1/‖h‖² over tokens, with h the residual stream after the output is added: the next norm makes errors
    relative to its size. In pre-norm models that size grows from layer to layer, so without the factor the first
    layers would always have the smallest errors. h is read on the first 128 sentences of the text. If the h of one
    module cannot be told (its output goes through a norm first), no errors get the factor. Errors relative to the
    energy of each module's output, which are common, chose worse in every case tried (benchmarks/pruning).

    Greedy: a head's score is the sum of errors when it and all cheaper heads are removed and the others refitted, so
    scoring anew in steps adds nothing.
    """

    name = "obs"
    summary = "error of the layer's output without the head, the other heads refitted (optimal brain surgeon)"
    why = "the other heads, refitted, make up for them best"
    changes = False
    refits = True

    def scores(self, context: ScoringContext) -> Scores:
        modules = list(reached_modules(context, moments_of(context)))
        texts = text_batches(context.checkpoint, context.text.first(MAX_SENTENCES), context.batching)
        inverse = inverse_sizes(context.checkpoint, texts)
        scales = [
            sum(inverse.get(site_layer, 0.0) for site_layer in projection.site_layers) for projection, _ in modules
        ]
        if not all(scales):
            scales = [1.0] * len(modules)
        scaled_modules = (
            (projection, sums, scale**0.5 * projection.weight)
            for scale, (projection, sums) in zip(scales, modules, strict=True)
        )
        return cumulative_scores(context, scaled_modules)


def inverse_sizes(checkpoint: Checkpoint, texts: Iterable[Batch]) -> dict[SiteLayer, float]:
    """E 1/‖h‖² over tokens, with h [d] the residual stream after the output of a (site, layer) is added.

    Without layers whose stream cannot be told.
    """
    sizes, without_stream = dict[SiteLayer, list[Tensor]](), set[SiteLayer]()
    for site_layer, _, output, stream in module_calls(checkpoint, texts):
        if stream is None:
            without_stream.add(site_layer)
        else:
            sizes.setdefault(site_layer, []).append((output + stream).square().sum(dim=1))
    sizes_with_stream = {
        site_layer: torch.cat(parts) for site_layer, parts in sizes.items() if site_layer not in without_stream
    }
    return {
        site_layer: float((1 / values[values > 0]).mean())
        for site_layer, values in sizes_with_stream.items()
        if values.any()
    }
