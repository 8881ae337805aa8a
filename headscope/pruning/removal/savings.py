"""What a removal saves: parameters, bytes, floating point operations, cache, and measured time."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.gradients import frozen_parameters
from headscope.model.interface import through_attend
from headscope.model.native.transformer import Transformer
from headscope.pruning.model_inputs import InputTexts, ModelInputs, outputs, vocabularies
from headscope.pruning.removal.decoding_speed import decoding_speed
from headscope.pruning.removal.timing import Timing, measure_timing
from headscope.pruning.removal.verify import BEAM, decodes_from_cache, parameters, search_some

MOST_BYTES = 2 << 30  # of logits in a pass that is timed


@dataclass(frozen=True)
class Size:
    """How large a model is. `flops` are those of one forward pass over the text that was compared on.

    `cache` are bytes of keys and values for each token of the decoder's own text, `cross_cache` for each token
    of the source.
    """

    parameters: int
    attention_heads: int
    bytes: int
    flops: int
    cache: int
    cross_cache: int


def size(checkpoint: Checkpoint, data: InputTexts) -> Size:
    """Count what a model has and does."""
    model = checkpoint.model
    tensors = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own, cross = _cache(checkpoint)
    return Size(
        parameters=parameters(model),
        attention_heads=sum(checkpoint.layout.values()),
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()),
        flops=sum(flops(model, batch) for batch in data.feeds),
        cache=own,
        cross_cache=cross,
    )


def flops(model: nn.Module, batch: ModelInputs) -> int:
    """Floating point operations of the matrix products of one forward pass, two for a multiplication and addition."""
    counter = FlopCounterMode(display=False)
    with through_attend(model), frozen_parameters(model), counter:  # the counter follows gradients of what modules get
        outputs(model, batch)
    return int(counter.get_total_flops())


def timings(before: Checkpoint, after: Checkpoint, data: InputTexts, *, batch: int, rounds: int) -> list[Timing]:
    """Forward passes over one sentence and over `batch` of them, beam search over one and over a few, and decoding."""
    measured = []
    for rows in dict.fromkeys((1, fitting(before, data, batch))):
        inputs = many(data.feeds, rows)
        old, new = partial(outputs, before.model, inputs), partial(outputs, after.model, inputs)
        measured.append(measure_timing("forward", rows, old, new, rounds))
    for sentences in (1, 8):
        search, again = (
            partial(search_some, checkpoint, data, beam=BEAM, sentences=sentences) for checkpoint in (before, after)
        )
        if again():
            measured.append(measure_timing("beam search", sentences, search, again, max(rounds // 2, 1)))
    if not before.two_sided and decodes_from_cache(before):
        decoding = decoding_speed(before, after, rounds=max(rounds // 2, 1))
        measured += [] if decoding is None else [decoding]
    return measured


def fitting(checkpoint: Checkpoint, data: InputTexts, batch: int) -> int:
    """As many of `batch` sentences as have logits of at most 2 GiB."""
    ids = many(data.feeds, 1).given
    if "pixel_values" in ids:
        return batch
    tokens = max(values.shape[1] for values in ids.values())
    return max(min(batch, MOST_BYTES // (tokens * max(vocabularies(checkpoint)) * 4)), 1)


def many(feeds: tuple[ModelInputs, ...], rows: int) -> ModelInputs:
    """The sentences of the middle batch, repeated until there are `rows`."""
    inputs = feeds[len(feeds) // 2]
    count = len(next(iter(inputs.given.values())))
    return inputs.rows(torch.arange(rows) % count)


def _cache(checkpoint: Checkpoint) -> tuple[int, int]:
    """Bytes of keys and values per token: of self attention in the decoder, of attention to the encoder."""
    width = torch.tensor([], dtype=checkpoint.dtype).element_size()
    sums = dict.fromkeys(Site, 0)
    if isinstance(checkpoint.model, Transformer):
        for site, _, _, module in checkpoint.model.attention_modules():
            sums[site] += module.heads * (module.d_head + module.d_value) * width
    else:
        for attention_site in checkpoint.attention_sites.order:  # a layer without heads keeps one stand-in in the cache
            sums[attention_site.site] += max(attention_site.groups, 1) * 2 * attention_site.width * width
    return sums[Site.DECODER_SELF], sums[Site.CROSS]
