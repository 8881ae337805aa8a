"""Reconstruction after a refit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from headscope.data.encoded import Batch
from headscope.engine.faithfulness.orders import Scores
from headscope.formats.base import Checkpoint
from headscope.pruning.closed_form.damage import MAX_SENTENCES
from headscope.pruning.closed_form.moments import Place, text_batches
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
    """Heads whose part of the layer's output the others cannot take over stay (block optimal brain surgeon).

    The squared error of a module's output after W_O was refitted without the head (Hassibi and Stork 1993 for blocks),
    times E 1/‖h‖² over tokens, where h is the residual stream that the output has been added to: the next norm sees
    what changes relative to its size. In pre-norm models that size grows from layer to layer, and as they are errors of
    the first layers would always be the smallest. h is read on the first 128 sentences of the text. Where one module's
    cannot be told (its output goes through a norm first) errors of all are compared as they are. Relative to the energy
    of each module's output, as is often done, they chose worse in every case tried (benchmarks/pruning).
    Greedy: each head is judged with all cheaper ones gone and the rest refitted, so the score is the sum of errors once
    it goes, and scoring again in steps adds nothing.
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
        scales = [sum(inverse.get(place, 0.0) for place in projection.places) for projection, _ in modules]
        if not all(scales):
            scales = [1.0] * len(modules)
        scaled_modules = (
            (projection, sums, scale**0.5 * projection.weight)
            for scale, (projection, sums) in zip(scales, modules, strict=True)
        )
        return cumulative_scores(context, scaled_modules)


def inverse_sizes(checkpoint: Checkpoint, texts: Iterable[Batch]) -> dict[Place, float]:
    """E 1/‖h‖² over real tokens, h [d] being the residual stream with the output of a (site, layer) added to it.

    Without places of which that cannot be told.
    """
    sizes, untold = dict[Place, list[Tensor]](), set[Place]()
    for place, _, output, stream in module_calls(checkpoint, texts):
        if stream is None:
            untold.add(place)
        else:
            sizes.setdefault(place, []).append((output + stream).square().sum(dim=1))
    sizes_by_place = {place: torch.cat(parts) for place, parts in sizes.items() if place not in untold}
    return {place: float((1 / values[values > 0]).mean()) for place, values in sizes_by_place.items() if values.any()}
