"""What a removal saves: how many times as fast it can be, by what has to be done, and measured time.

Times are wall seconds of the models before and after in turns, each first in every other round, so that a machine whose
pace changes slows both; both write outputs of the same length.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from headscope.formats.base import Checkpoint
from headscope.formats.size import Size
from headscope.model.discovery import eval_mode
from headscope.model.forward import ModelInputs, outputs, with_cache
from headscope.model.interface import suppress_warnings
from headscope.model.native.in_parts import generates
from headscope.pruning.model_inputs import InputTexts
from headscope.pruning.removal.verify import BEAM, search_some

MOST_BYTES = 2 << 30  # of logits in a pass that is timed
FILLED, TEXTS, STEPS = 256, 8, 16
"""Tokens in the cache (fewer where the model has fewer positions), texts at once, and tokens written to each."""
LONG_RUN, LONG_TIMING, FEWEST_ROUNDS = 10.0, 20.0, 2
"""Seconds that a pass of many sentences may take, and all rounds of a timing, of which there are this many however."""


def speedup_bound(timing: Timing, before: Size, after: Size) -> float:
    """How many times as fast a removal can make what was timed, by what has to be done.

    By the bytes of weights and cache that each step of decoding reads; by floating point operations of a pass; of a
    search, which is neither alone, by the larger of both. Counts alone: caches and kernels make some pairs faster.
    """
    cached = timing.context * timing.sentences
    read = [size.read + cached * (size.cache + size.cross_cache) for size in (before, after)]
    by_bytes, by_flops = read[0] / max(read[1], 1), before.flops / max(after.flops, 1)
    if timing.context:
        return by_bytes
    return by_flops if timing.what.endswith("forward") else max(by_bytes, by_flops)


def timings(before: Checkpoint, after: Checkpoint, data: InputTexts, *, batch: int, rounds: int) -> list[Timing]:
    """Forward passes over one sentence and over `batch` of them, beam search over one and over a few, and decoding."""

    def forward(rows: int) -> Timing:
        inputs = repeat_rows(data.feeds, rows)
        old, new = partial(outputs, before.model, inputs), partial(outputs, after.model, inputs)
        return measure_timing("forward", rows, old, new, rounds)

    measured = [forward(1)]
    most = max(LONG_RUN / max(measured[0].before, 1e-9), 1)
    rows = min(max_batch_size(before, data, batch), 2 ** int(math.log2(most)))
    if rows > 1:
        measured.append(forward(rows))
    for sentences in (1, 8):
        search, again = (
            partial(search_some, checkpoint, data, beam=BEAM, sentences=sentences, exact=True)
            for checkpoint in (before, after)
        )
        if again():
            measured.append(measure_timing("beam search", sentences, search, again, rounds))
    if before.decodes and not before.two_sided and generates(before.model):
        decoding = decoding_speed(before, after, rounds=rounds)
        measured += [] if decoding is None else [decoding]
    return measured


def max_batch_size(checkpoint: Checkpoint, data: InputTexts, batch: int) -> int:
    """As many of `batch` sentences as have logits of at most 2 GiB."""
    ids = repeat_rows(data.feeds, 1).arguments
    if "pixel_values" in ids:
        return batch
    tokens = max(values.shape[1] for values in ids.values())
    return max(min(batch, MOST_BYTES // (tokens * max(checkpoint.vocabularies) * 4)), 1)


def repeat_rows(feeds: tuple[ModelInputs, ...], rows: int) -> ModelInputs:
    """The sentences of the middle batch, repeated until there are `rows`."""
    inputs = feeds[len(feeds) // 2]
    count = len(next(iter(inputs.arguments.values())))
    return inputs.rows(torch.arange(rows) % count)


# Time.


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run before and after, and their ratio; `tokens` that a run writes, where it decodes.

    `context` is how many tokens of each sentence are in the cache before that.
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
    context: int = 0


def measure_timing(
    what: str, sentences: int, before: Callable[[], Any], after: Callable[[], Any], rounds: int
) -> Timing:
    """Time two functions in turns, after one run of each that does not count."""
    old, new = partial(_seconds, before), partial(_seconds, after)
    return time_interleaved(what, sentences, old, new, affordable(rounds, old() + new()))


def affordable(rounds: int, seconds: float) -> int:
    """As many of `rounds` as a timing may have whose rounds take so many seconds each."""
    return min(rounds, max(FEWEST_ROUNDS, int(LONG_TIMING / max(seconds, 1e-9))))


def time_interleaved(
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
    """Seconds of `STEPS` steps of greedy decoding of `TEXTS` texts, in turns; None where caches cannot be copied."""
    filled = max(1, min(FILLED, (before.limit or FILLED) - STEPS - 1))
    both = (before, after)
    try:
        caches = [_filled(checkpoint, filled) for checkpoint in both]
        first = sum(_steps(checkpoint, start) for checkpoint, start in zip(both, caches, strict=True))  # not counted
    except Exception:  # whatever an architecture's own code raises (RecurrentGemma)
        return None
    old, new = (partial(_steps, checkpoint, start) for checkpoint, start in zip(both, caches, strict=True))
    rounds = affordable(rounds, first)
    timing = time_interleaved(f"decoding after {filled} tokens", TEXTS, old, new, rounds, tokens=TEXTS * STEPS)
    return replace(timing, context=filled)


def _filled(checkpoint: Checkpoint, length: int) -> Any:
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(checkpoint.vocabularies[0], (1, length), generator=noise).to(checkpoint.device)
    with eval_mode(checkpoint.model), torch.inference_mode(), suppress_warnings():
        _, cache = with_cache(checkpoint.model, input_ids=ids)
        cache.batch_repeat_interleave(TEXTS)
    return cache


def _steps(checkpoint: Checkpoint, start: Any) -> float:
    model: Any = checkpoint.model
    tokens = torch.zeros(TEXTS, 1, dtype=torch.long, device=checkpoint.device)
    with eval_mode(model), torch.inference_mode(), suppress_warnings():
        cache = copy.deepcopy(start)
        wait_for_device()
        began = time.perf_counter()
        for _ in range(STEPS):
            result, cache = with_cache(model, cache, input_ids=tokens)
            tokens = result.logits[:, -1:].argmax(dim=-1)
        wait_for_device()
        return time.perf_counter() - began
