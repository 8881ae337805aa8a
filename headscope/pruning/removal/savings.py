"""What a removal saves: parameters, bytes, floating point operations, cache, and measured time.

Times are wall seconds of the models before and after in turns, each first in every other round, so that a machine whose
pace changes slows both; both write outputs of the same length.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.discovery import eval_mode
from headscope.model.gradients import frozen_parameters
from headscope.model.interface import suppress_warnings, through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.threads import threads_for_pass
from headscope.pruning.model_inputs import InputTexts, ModelInputs, outputs, vocabularies
from headscope.pruning.removal.verify import BEAM, decodes_from_cache, parameters, search_some

MOST_BYTES = 2 << 30  # of logits in a pass that is timed
FILLED, TEXTS, STEPS = 256, 8, 16
"""Tokens in the cache (fewer where the model has fewer positions), texts at once, and tokens written to each."""


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
            partial(search_some, checkpoint, data, beam=BEAM, sentences=sentences, exact=True)
            for checkpoint in (before, after)
        )
        if again():
            measured.append(measure_timing("beam search", sentences, search, again, rounds))
    if not before.two_sided and decodes_from_cache(before):
        decoding = decoding_speed(before, after, rounds=rounds)
        measured += [] if decoding is None else [decoding]
    return measured


def fitting(checkpoint: Checkpoint, data: InputTexts, batch: int) -> int:
    """As many of `batch` sentences as have logits of at most 2 GiB."""
    ids = many(data.feeds, 1).arguments
    if "pixel_values" in ids:
        return batch
    tokens = max(values.shape[1] for values in ids.values())
    return max(min(batch, MOST_BYTES // (tokens * max(vocabularies(checkpoint)) * 4)), 1)


def many(feeds: tuple[ModelInputs, ...], rows: int) -> ModelInputs:
    """The sentences of the middle batch, repeated until there are `rows`."""
    inputs = feeds[len(feeds) // 2]
    count = len(next(iter(inputs.arguments.values())))
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


# Time.


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run before and after, and their ratio; `tokens` that a run writes, where it decodes.

    `least` and `most` are the smallest and the largest ratio of a round: the spread of what was measured.
    """

    what: str
    sentences: int
    before: float
    after: float
    speedup: float
    tokens: int = 0
    least: float = math.nan
    most: float = math.nan


def measure_timing(
    what: str, sentences: int, before: Callable[[], Any], after: Callable[[], Any], rounds: int
) -> Timing:
    """Time two functions in turns, after one run of each that does not count."""
    before(), after()
    return in_turns(what, sentences, partial(_seconds, before), partial(_seconds, after), rounds)


def in_turns(
    what: str, sentences: int, before: Callable[[], float], after: Callable[[], float], rounds: int, *, tokens: int = 0
) -> Timing:
    """Medians of what two functions say that they took, one after the other in every round, in turns the first."""
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = after()
            pairs.append((before(), second))
        else:
            pairs.append((before(), after()))
    old, new = (median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = [first / second for first, second in pairs]
    return Timing(what, sentences, old, new, old / new, tokens=tokens, least=min(ratios), most=max(ratios))


def _seconds(work: Callable[[], Any]) -> float:
    wait_for_device()
    start = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - start


def wait_for_device() -> None:
    """Until an accelerator has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decoding_speed(before: Checkpoint, after: Checkpoint, *, rounds: int) -> Timing | None:
    """Seconds of `STEPS` steps of greedy decoding of `TEXTS` texts; of models of one side with a cache.

    The models take turns. Filling the cache is not timed. None for architectures that hand no cache on, or one that
    cannot be copied for several texts.
    """
    filled = max(1, min(FILLED, (before.limit or FILLED) - STEPS - 1))
    both = (before, after)
    try:
        caches = [_filled(checkpoint, filled) for checkpoint in both]
        for checkpoint, start in zip(both, caches, strict=True):
            _steps(checkpoint, start)  # the first does not count
    except Exception:  # whatever an architecture's own code raises (RecurrentGemma)
        return None
    old, new = (partial(_steps, checkpoint, start) for checkpoint, start in zip(both, caches, strict=True))
    return in_turns(f"decoding after {filled} tokens", TEXTS, old, new, rounds, tokens=TEXTS * STEPS)


def _filled(checkpoint: Checkpoint, length: int) -> Any:
    """The cache of `TEXTS` texts of random tokens, all the same."""
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabularies(checkpoint)[0], (1, length), generator=noise).to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.inference_mode(), suppress_warnings():
        cache = checkpoint.model(input_ids=ids, use_cache=True).past_key_values
        cache.batch_repeat_interleave(TEXTS)
    return cache


def _steps(checkpoint: Checkpoint, start: Any) -> float:
    """Seconds of all steps from a copy of a cache."""
    model: Any = checkpoint.model
    tokens = torch.zeros(TEXTS, 1, dtype=torch.long, device=checkpoint.device)
    with eval_mode(model), torch.inference_mode(), suppress_warnings(), threads_for_pass(model, TEXTS):
        cache = copy.deepcopy(start)
        wait_for_device()
        began = time.perf_counter()
        for _ in range(STEPS):
            logits: Tensor = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(dim=-1)
        wait_for_device()
        return time.perf_counter() - began
