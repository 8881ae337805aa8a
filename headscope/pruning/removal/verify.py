"""Verify that a smaller model computes what the whole one computes with those heads masked; time both.

Three comparisons, all against the masked original: logits of whole texts, logits of the same texts fed in two
parts through the key/value cache, and translations (or continuations) found by beam search. Times are wall seconds of
the models before and after in turns, each first in every other round, so that a machine whose pace changes slows both.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from headscope.config.commands import TranslateOptions
from headscope.errors import CheckpointError, HeadscopeError, NumericalError, flag
from headscope.evaluation.model_inputs import InputTexts
from headscope.formats.base import Checkpoint
from headscope.formats.size import Size
from headscope.heads import HeadId
from headscope.model.attention import is_half
from headscope.model.discovery import eval_mode
from headscope.model.forward import (
    ModelInputs,
    cached_difference,
    double_precision,
    first_sentence,
    generates,
    max_abs_difference,
    outputs,
    outputs_in_parts,
    reference,
    return_freed_memory,
    rounds,
    running_narrowed,
    with_cache,
)
from headscope.model.interface import suppress_warnings, through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import why_not_changed
from headscope.model.taps import masked

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF_TOLERANCE = 5e-2
FLOAT64_TOLERANCE = 1e-9
"""Models whose logits differ by no more in float64 compute the same: a difference in a narrower type is rounding."""
SEARCH_SENTENCES, NEW_TOKENS, BEAM = 8, 12, 4


@dataclass(frozen=True)
class Rounding:
    """Differences of logits, as shares of the largest logit, on the line where the two models differ most.

    `difference` is between the models in float64; `masked` and `smaller` are between each model in its own type and
    itself in float64.
    """

    difference: float
    masked: float
    smaller: float


@dataclass(frozen=True)
class Verification:
    """Largest differences of logits, as a share of the largest logit (or of 1), and what was compared.

    All but `reloaded` are against the masked original: `own` with the smaller model's own attention implementation,
    `cached` in two parts through the cache (None: there is none), `searched` of `searches` beam searches that end
    alike. `reloaded` compares the saved files with the model in memory. `rounding` is measured where a difference
    exceeds its tolerance.
    """

    data: str
    sentences: int
    difference: float
    tolerance: float
    own: float
    cached: float | None
    searched: int
    searches: int
    reloaded: float | None = None
    rounding: Rounding | None = None

    @property
    def rounds(self) -> str:
        """A line on how far the type of the weights rounds, where a difference exceeds its tolerance; else ""."""
        if self.rounding is None:
            return ""
        rounding = self.rounding
        return (
            f"rounding: in float64 both models' logits differ by {rounding.difference:.1e}; by itself the masked model "
            f"is {rounding.masked:.1e} off its float64 logits, the smaller one {rounding.smaller:.1e}"
        )


def verify(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], data: InputTexts) -> Verification:
    """Compare logits and beam searches of `shrunk` and of `checkpoint` with `heads` masked.

    The tolerance is 1e-5 in float32, 1e-10 in float64 and 0.05 in half precision, times the largest logit. Where
    it is exceeded, both models compute the line that differs most in float64, and must agree to 1e-9 there. A float64
    model whose own code rounds to float32 has the tolerance of float32. CheckpointError where the models differ.
    """
    comparison = compare(checkpoint, shrunk, heads, data)
    with running_narrowed(checkpoint.model_type):
        searches = search_some(shrunk, data)
    with masked(checkpoint.model, heads):
        expected_searches = search_some(checkpoint, data)
    same = sum(text == other for text, other in zip(searches, expected_searches, strict=True))
    return replace(comparison, searched=same, searches=len(searches))


def compare(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], data: InputTexts) -> Verification:
    """`verify` without the beam searches."""
    default = HALF_TOLERANCE if is_half(checkpoint.dtype) else TOLERANCE[torch.float32]
    tolerance = TOLERANCE.get(checkpoint.dtype, default)
    differences, own, cache_difference, rounding = list[float](), 0.0, None, None
    for batch in data.feeds:
        expected_logits = reference(checkpoint, heads, batch)
        with running_narrowed(checkpoint.model_type):
            with through_attend(shrunk.model):
                differences.append(max_abs_difference(outputs(shrunk.model, batch), expected_logits))
            own = max(own, max_abs_difference(outputs(shrunk.model, batch), expected_logits))
    if checkpoint.decodes:
        with running_narrowed(checkpoint.model_type):
            cache_difference = cached_difference(checkpoint, shrunk.model, heads, data.feeds[-1])
    difference = max(differences)
    if max(difference, (cache_difference or 0.0) / 10) > tolerance:
        line = first_sentence(data.feeds[-1])
        if difference > tolerance:
            line = _worst_line(checkpoint, shrunk, heads, data.feeds[differences.index(difference)])
        if checkpoint.dtype == torch.float64:
            tolerance = TOLERANCE[torch.float32] if rounds(checkpoint.model, line) else tolerance
        elif why_not_changed(checkpoint.model) is None and checkpoint.device.type != "mps":
            rounding = _in_float64(checkpoint, shrunk, heads, line, has_cache=cache_difference is not None)
    if rounding is None:
        require(difference, tolerance, "the smaller model", merges=not heads)
        require(cache_difference or 0.0, 10 * tolerance, "the key/value cache of the smaller model", merges=not heads)
    sentences = len(data.sources) or sum(len(next(iter(batch.arguments.values()))) for batch in data.feeds)
    return Verification(data.name, sentences, difference, tolerance, own, cache_difference, 0, 0, rounding=rounding)


def _worst_line(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], batch: ModelInputs) -> ModelInputs:
    """The line of a batch on which two models differ most."""

    def difference(line: ModelInputs) -> float:
        expected_logits = reference(checkpoint, heads, line)
        with running_narrowed(checkpoint.model_type), through_attend(shrunk.model):
            return max_abs_difference(outputs(shrunk.model, line), expected_logits)

    count = len(next(iter(batch.arguments.values())))
    return max((first_sentence(batch.rows(torch.tensor([number]))) for number in range(count)), key=difference)


def _in_float64(
    checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], line: ModelInputs, *, has_cache: bool
) -> Rounding | None:
    """The differences on a line due to rounding; None where the models differ in float64 too.

    The cache's difference counts where it is larger. Only one model is in float64 at a time, to save memory.
    """
    wide = ModelInputs(
        {name: values.double() if values.is_floating_point() else values for name, values in line.arguments.items()},
        line.real,
    )
    return_freed_memory()
    with double_precision(checkpoint.model):
        expected_logits = reference(checkpoint, heads, wide)
    with double_precision(shrunk.model), through_attend(shrunk.model):
        logits = outputs(shrunk.model, wide)
        difference = max_abs_difference(logits, expected_logits)
        if has_cache:
            difference = max(difference, max_abs_difference(outputs_in_parts(shrunk.model, wide), expected_logits))
    if difference > FLOAT64_TOLERANCE:
        with double_precision(checkpoint.model):
            if difference > TOLERANCE[torch.float32] or not rounds(checkpoint.model, wide):
                return None
    with through_attend(shrunk.model):
        smaller = max_abs_difference(outputs(shrunk.model, line), logits)
    masked_original = max_abs_difference(reference(checkpoint, heads, line), expected_logits)
    return Rounding(difference, masked_original, smaller)


def require(difference: float, tolerance: float, what: str, *, merges: bool) -> None:
    """Raise CheckpointError if a difference from the model with heads masked, or (`merges`) averaged, is too large."""
    if not difference <= tolerance:
        reference_words = "its key/value heads averaged in place" if merges else "these heads masked"
        advice = "" if merges else f"; {flag.export} masked may do"
        raise CheckpointError(
            f"{what} computes something else than the whole model with {reference_words} (logits differ by "
            f"{difference:.1e}, tolerance {tolerance:.0e}); nothing was saved{advice}"
        )


def search_some(
    checkpoint: Checkpoint, data: InputTexts, *, sentences: int = SEARCH_SENTENCES, exact: bool = False
) -> list[Any]:
    """Translations, or continuations, of at most 12 tokens by beam search; empty for models that do not generate.

    `exact`: of 12 tokens each, so that two models do the same work.
    """
    if checkpoint.two_sided and data.sources:
        length = NEW_TOKENS if exact else None
        options = TranslateOptions(beam=BEAM, max_len_a=0, max_len_b=NEW_TOKENS, exact=length)
        try:
            translations = checkpoint.translations(list(data.sources[:sentences]), options)
        except NumericalError:
            raise
        except HeadscopeError:  # a model without an output layer, or without a target vocabulary
            return []
        return [of_sentence[0].text for of_sentence in translations]
    if isinstance(checkpoint.model, Transformer) or not (checkpoint.decodes and generates(checkpoint.model)):
        return []
    model: Any = checkpoint.model
    arguments = data.feeds[0].arguments.items()
    source = {name: rows[:sentences] for name, rows in arguments if not name.startswith("decoder_")}
    if not checkpoint.two_sided:  # cut to the shortest: padding on the right would stand before the continuation
        width = max(int(source["attention_mask"].sum(dim=1).min()), 1)
        source = {name: values[:, :width] for name, values in source.items()}
    settings = {"num_beams": BEAM, "max_new_tokens": NEW_TOKENS, "do_sample": False, "early_stopping": True}
    settings |= {"min_new_tokens": NEW_TOKENS} if exact else {}
    with torch.no_grad(), suppress_warnings():
        try:
            ids: list[list[int]] = model.generate(**source, **settings).tolist()
        except (IndexError, ValueError):  # a T5 with a decoder deeper than its encoder; a model without a start token
            return []
    return list(ids)


MAX_BYTES = 1 << 29  # of logits in a pass that is timed
CACHE_TOKENS, TEXTS, STEPS = 256, 8, 8
"""Tokens in the cache (fewer where the model has fewer positions), texts at once, and tokens generated for each."""
MAX_PASS_SECONDS, MAX_TIMING_SECONDS, FEWEST_ROUNDS = 2.0, 5.0, 2
"""Limits of one pass over many sentences, and of all rounds of a timing; there are always this many rounds."""


def speedup_bound(timing: Timing, before: Size, after: Size) -> float:
    """The speed-up to expect if time were proportional to counted work.

    That is, for decoding, the bytes of weights and cache read at each step; for a forward pass, its floating point
    operations; for a beam search, which does both, the larger ratio. Caches and kernels make some pairs faster still.
    """
    cache_entries = timing.context * timing.sentences
    read = [size.read + cache_entries * (size.cache + size.cross_cache) for size in (before, after)]
    by_bytes, by_flops = read[0] / max(read[1], 1), before.flops / max(after.flops, 1)
    if timing.context:
        return by_bytes
    return by_flops if timing.what.endswith("forward") else max(by_bytes, by_flops)


def timings(before: Checkpoint, after: Checkpoint, data: InputTexts, *, batch: int, rounds: int) -> list[Timing]:
    """Forward passes over one sentence and over `batch` of them; decoding, or beam search over one and over a few."""

    def time_models(what: str, rows: int, work: Callable[[Checkpoint], Any]) -> Timing:
        old, new = (partial(_seconds, partial(work, checkpoint)) for checkpoint in (before, after))
        return time_interleaved(what, rows, old, new, rounds)

    def forward(rows: int) -> Timing:
        inputs = repeat_rows(data.feeds, rows)
        return time_models("forward", rows, lambda checkpoint: outputs(checkpoint.model, inputs))

    results = [forward(1)]
    max_rows = max(MAX_PASS_SECONDS / max(results[0].before, 1e-9), 1)
    inputs = repeat_rows(data.feeds, 1).arguments
    if "pixel_values" not in inputs:  # so many that logits take 512 MiB at most
        n_tokens = max(values.shape[1] for values in inputs.values())
        batch = max(min(batch, MAX_BYTES // (n_tokens * max(before.vocabularies) * 4)), 1)
    rows = min(batch, 2 ** int(math.log2(max_rows)))
    if rows > 1:
        results.append(forward(rows))
    if before.decodes and not before.two_sided and generates(before.model):
        with suppress(Exception):  # whatever an architecture's own code raises (RecurrentGemma)
            results.append(decoding_speed(before, after, rounds=rounds))
        return results
    for sentences in (1, 8):
        search = partial(search_some, data=data, sentences=sentences, exact=True)
        if search(after):
            results.append(time_models("beam search", sentences, search))
    return results


def repeat_rows(feeds: tuple[ModelInputs, ...], rows: int) -> ModelInputs:
    """The sentences of the middle batch, repeated until there are `rows`."""
    inputs = feeds[len(feeds) // 2]
    count = len(next(iter(inputs.arguments.values())))
    return inputs.rows(torch.arange(rows) % count)


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run of the models `before` and `after` removal, and their ratio.

    `least` and `most` are the smallest and the largest ratio of a round. A run that decodes generates `tokens`, with
    `context` tokens of each sentence in the cache already.
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


def time_interleaved(
    what: str, sentences: int, before: Callable[[], float], after: Callable[[], float], rounds: int
) -> Timing:
    """The timing of two functions, each of which returns its seconds; in every other round the second one is first.

    A first run of each is not counted; it decides how many of the `rounds` there is time for.
    """
    rounds = min(rounds, max(FEWEST_ROUNDS, int(MAX_TIMING_SECONDS / max(before() + after(), 1e-9))))
    pairs = []
    for number in range(rounds):
        if number % 2:
            second = after()
            pairs.append((before(), second))
        else:
            pairs.append((before(), after()))
    old, new = (median(seconds) for seconds in zip(*pairs, strict=True))
    ratios = [first / second for first, second in pairs]
    return Timing(what, sentences, old, new, old / new, least=min(ratios), most=max(ratios))


def _seconds(work: Callable[[], Any]) -> float:
    wait_for_device: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait_for_device()
    start = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - start


def decoding_speed(before: Checkpoint, after: Checkpoint, *, rounds: int) -> Timing:
    """The timing of `STEPS` steps of greedy decoding of `TEXTS` texts, from copies of a filled cache."""
    n_tokens = max(1, min(CACHE_TOKENS, (before.limit or CACHE_TOKENS) - STEPS - 1))
    noise = torch.Generator().manual_seed(0)
    ids = torch.randint(before.vocabularies[0], (1, n_tokens), generator=noise).to(before.device)

    def decode(model: nn.Module, cache: Any) -> None:
        tokens = torch.zeros(TEXTS, 1, dtype=torch.long, device=ids.device)
        for _ in range(STEPS):
            result, cache = with_cache(model, cache, input_ids=tokens)
            tokens = result.logits[:, -1:].argmax(dim=-1)

    def time_decoding(model: nn.Module, cache: Any) -> float:
        with eval_mode(model), torch.inference_mode(), suppress_warnings():
            return _seconds(partial(decode, model, copy.deepcopy(cache)))

    runs = list[Callable[[], float]]()
    for checkpoint in (before, after):
        with eval_mode(checkpoint.model), torch.inference_mode(), suppress_warnings():
            _, cache = with_cache(checkpoint.model, input_ids=ids)
            cache.batch_repeat_interleave(TEXTS)
        runs.append(partial(time_decoding, checkpoint.model, cache))
    what, (old, new) = f"decoding after {n_tokens} tokens", runs
    return replace(time_interleaved(what, TEXTS, old, new, rounds), tokens=TEXTS * STEPS, context=n_tokens)
