"""Proof that a model without some heads computes what the whole one computes with those heads masked.

Three comparisons, all against the masked original: logits of whole texts, logits of the same texts fed in two
parts through the key/value cache, and translations (or continuations) found by beam search.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headscope.errors import CheckpointError, HeadscopeError, NumericalError
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId
from headscope.model.attention import is_half
from headscope.model.forward import ModelInputs, max_abs_difference, outputs, reference, rounds, running_narrowed
from headscope.model.interface import suppress_warnings, through_attend
from headscope.model.native.in_parts import cached_difference, generates
from headscope.model.native.transformer import Transformer
from headscope.model.stored_weights import why_not_changed
from headscope.model.taps import masked
from headscope.pruning.model_inputs import InputTexts

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF = 5e-2
ALIKE = 1e-9
"""Logits that differ by no more in float64 are the same: what they differ by in fewer digits is rounding."""
SEARCHED, NEW, BEAM = 8, 12, 4


@dataclass(frozen=True)
class Rounding:
    """What differences of logits come to in float64, on the lines where they are largest; shares of the largest logit.

    `difference` is that of both models in float64, `masked` and `smaller` how far each of them rounds in its own type.
    """

    difference: float
    masked: float
    smaller: float


@dataclass(frozen=True)
class Verification:
    """Largest differences of logits, as a share of the largest logit (or of 1), and what was compared.

    `own` is with the model's own attention implementation, `cached` in two parts through the cache (None: there is
    none), `searched` how many of the `searches` ended alike; these are against the masked original. `reloaded` is what
    the saved files give, `rounding` is measured where a difference exceeds its tolerance.
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
        """By how much the type of the weights rounds, where that is more than the tolerance."""
        if self.rounding is None:
            return ""
        found = self.rounding
        return (
            f"rounding: in float64 both models' logits differ by {found.difference:.1e}; by itself the masked model is "
            f"{found.masked:.1e} off its float64 logits, the smaller one {found.smaller:.1e}"
        )


def verify(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], data: InputTexts) -> Verification:
    """Compare `shrunk` with `checkpoint` under a mask of `heads`; CheckpointError where they differ.

    The tolerance is 1e-5 in float32, 1e-10 in float64 and 0.05 in half precision, times the largest logit. Where
    it does not hold, the lines that differ most are computed in float64 by both models, which must agree to 1e-9 there.
    In float64 the tolerance is that of float32 if the model's own code rounds to float32 on its way.
    """
    compared = compare(checkpoint, shrunk, heads, data)
    with running_narrowed(checkpoint.model_type):
        searched = search_some(shrunk, data, beam=BEAM)
    with masked(checkpoint.model, heads):
        wanted_search = search_some(checkpoint, data, beam=BEAM)
    same = sum(text == other for text, other in zip(searched, wanted_search, strict=True))
    return replace(compared, searched=same, searches=len(searched))


def compare(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], data: InputTexts) -> Verification:
    """The same without searches; CheckpointError as there."""
    tolerance = TOLERANCE.get(checkpoint.dtype, HALF if is_half(checkpoint.dtype) else TOLERANCE[torch.float32])
    differences, own, cached, rounding = list[float](), 0.0, None, None
    for batch in data.feeds:
        wanted = reference(checkpoint, heads, batch)
        with running_narrowed(checkpoint.model_type):
            with through_attend(shrunk.model):
                differences.append(max_abs_difference(outputs(shrunk.model, batch), wanted))
            own = max(own, max_abs_difference(outputs(shrunk.model, batch), wanted))
    if checkpoint.decodes:
        with running_narrowed(checkpoint.model_type):
            cached = cached_difference(checkpoint, shrunk.model, heads, data.feeds[-1])
    difference = max(differences)
    if max(difference, (cached or 0.0) / 10) > tolerance:
        worst = data.feeds[differences.index(difference)] if difference > tolerance else data.feeds[-1]
        if checkpoint.dtype == torch.float64:
            tolerance = TOLERANCE[torch.float32] if rounds(checkpoint.model, worst) else tolerance
        elif why_not_changed(checkpoint.model) is None and checkpoint.device.type != "mps":
            rounding = _in_float64(checkpoint, shrunk, heads, worst)
    if rounding is None:
        require(difference, tolerance, "the smaller model", merges=not heads)
        require(cached or 0.0, 10 * tolerance, "the key/value cache of the smaller model", merges=not heads)
    sentences = len(data.sources) or sum(len(next(iter(batch.arguments.values()))) for batch in data.feeds)
    return Verification(data.name, sentences, difference, tolerance, own, cached, 0, 0, rounding=rounding)


def _in_float64(
    checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], batch: ModelInputs
) -> Rounding | None:
    """How far apart two models are in float64 on a batch, and how far each is from itself there; None: too far.

    The cache's difference counts where it is larger.
    """
    wide = ModelInputs(
        {name: each.double() if each.is_floating_point() else each for name, each in batch.arguments.items()},
        batch.real,
    )
    whole, smaller = (each.with_model(copy.deepcopy(each.model).double()) for each in (checkpoint, shrunk))
    wanted = reference(whole, heads, wide)
    with through_attend(smaller.model):
        found = outputs(smaller.model, wide)
    cached = cached_difference(whole, smaller.model, heads, wide) if checkpoint.decodes else None
    difference = max(max_abs_difference(found, wanted), cached or 0.0)
    if difference > ALIKE and not (difference <= TOLERANCE[torch.float32] and rounds(whole.model, wide)):
        return None
    with through_attend(shrunk.model):
        narrow = outputs(shrunk.model, batch)
    own = reference(checkpoint, heads, batch)
    return Rounding(difference, max_abs_difference(own.double(), wanted), max_abs_difference(narrow.double(), found))


def require(difference: float, tolerance: float, what: str, *, merges: bool) -> None:
    """CheckpointError where a difference to the model with heads masked, or (`merges`) averaged, is too large."""
    if not difference <= tolerance:
        whole = "its key/value heads averaged in place" if merges else "these heads masked"
        advice = [] if merges else ["--export masked may do"]
        raise CheckpointError(
            f"{what} computes something else than the whole model with {whole} (logits differ by "
            f"{difference:.1e}, tolerance {tolerance:.0e}); {'; '.join(('nothing was saved', *advice))}"
        )


# Search.


def search_some(
    checkpoint: Checkpoint, data: InputTexts, *, beam: int, sentences: int = SEARCHED, exact: bool = False
) -> list[Any]:
    """Translations, or continuations, of at most 12 tokens by beam search; nothing for models that generate nothing.

    `exact`: of 12 tokens each, so that two models do the same work.
    """
    if checkpoint.two_sided and data.sources:
        options = TranslateOptions(beam=beam, max_ratio=0, max_extra=NEW, exact=NEW if exact else None)
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
    every = data.feeds[0].arguments.items()
    source = {name: rows[:sentences] for name, rows in every if not name.startswith("decoder_")}
    if not checkpoint.two_sided:  # the same length for all: padding on the right would stand inside
        width = max(int(source["attention_mask"].sum(dim=1).min()), 1)
        source = {name: values[:, :width] for name, values in source.items()}
    settings = {"num_beams": beam, "max_new_tokens": NEW, "do_sample": False, "early_stopping": beam > 1}
    settings |= {"min_new_tokens": NEW} if exact else {}
    with torch.no_grad(), suppress_warnings():
        try:
            ids: list[list[int]] = model.generate(**source, **settings).tolist()
        except IndexError:  # transformers cannot: its cache has as many layers as the encoder, a T5's decoder more
            return []
        except ValueError:  # nothing says what the decoder begins with
            return []
    return list(ids)
