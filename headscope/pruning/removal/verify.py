"""Proof that a model without some heads computes what the whole one computes with those heads masked.

Three comparisons, all against the masked original: logits of whole texts, logits of the same texts fed in two
parts through the key/value cache, and translations (or continuations) found by beam search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headscope.errors import CheckpointError, HeadscopeError, NumericalError
from headscope.formats.base import Checkpoint
from headscope.formats.translate_options import TranslateOptions
from headscope.heads import HeadId, Site
from headscope.model.forward import ModelInputs, max_abs_difference, outputs, reference, with_cache
from headscope.model.gating import masked
from headscope.model.gradients import frozen_parameters
from headscope.model.interface import is_half, suppress_warnings, through_attend
from headscope.model.native.transformer import Transformer
from headscope.model.threads import threads_for_pass
from headscope.pruning.model_inputs import InputTexts

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
HALF = 5e-2
SEARCHED, NEW, BEAM = 8, 12, 4


@dataclass(frozen=True)
class Verification:
    """Largest differences of logits, as a share of the largest logit (or of 1), and what was compared.

    `own` is with the model's own attention implementation instead of headscope's, `cached` in two parts through
    the cache (None where the model has none), `searched` how many searches out of `searches` ended alike,
    `reloaded` is what the saved files give. All are against the masked original.
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


def verify(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], data: InputTexts) -> Verification:
    """Compare `shrunk` with `checkpoint` under a mask of `heads`; CheckpointError where they differ.

    The tolerance is 1e-5 in float32, 1e-10 in float64 and 0.05 in half precision, times the largest logit. In float64
    it is that of float32 where 1e-10 does not hold and the model's own code rounds to float32 on its way.
    """
    tolerance = TOLERANCE.get(checkpoint.dtype, HALF if is_half(checkpoint.dtype) else 1e-5)
    difference, own = 0.0, 0.0
    with threads_for_pass(checkpoint.model, max((feed.positions for feed in data.feeds), default=0)):
        for batch in data.feeds:
            wanted = reference(checkpoint, heads, batch)
            with _running(checkpoint):
                with through_attend(shrunk.model):
                    difference = max(difference, max_abs_difference(outputs(shrunk.model, batch), wanted))
                own = max(own, max_abs_difference(outputs(shrunk.model, batch), wanted))
        with _running(checkpoint):
            cached = _cached(checkpoint, shrunk, heads, data.feeds[-1])
        if max(difference, (cached or 0.0) / 10) > tolerance and _rounds(checkpoint, data.feeds[0]):
            tolerance = TOLERANCE[torch.float32]
        require(difference, tolerance, "the smaller model", merges=not heads)
        if cached is not None:
            require(cached, 10 * tolerance, "the key/value cache of the smaller model", merges=not heads)
        with _running(checkpoint):
            searched = search_some(shrunk, data, beam=BEAM)
        with masked(checkpoint.model, heads):
            wanted_search = search_some(checkpoint, data, beam=BEAM)
    same = sum(text == other for text, other in zip(searched, wanted_search, strict=True))
    sentences = len(data.sources) or sum(len(next(iter(batch.arguments.values()))) for batch in data.feeds)
    return Verification(data.name, sentences, difference, tolerance, own, cached, same, len(searched))


def _rounds(checkpoint: Checkpoint, batch: ModelInputs) -> bool:
    """Whether a model in double precision computes parts in single precision (mixtures, state spaces, norms)."""
    if checkpoint.dtype != torch.float64:
        return False
    model = checkpoint.model
    with through_attend(model), frozen_parameters(model, trainable=True), torch.enable_grad(), _Casts() as casts:
        model(**batch.arguments)
    return bool(casts.noticed)


class _Casts(TorchFunctionMode):
    """Notices functions that make single precision of double precision that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.noticed: bool = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == torch.float32:
            self.noticed = self.noticed or any(
                isinstance(each, Tensor) and each.dtype == torch.float64 and each.requires_grad for each in args
            )
        return result


@contextmanager
def _running(checkpoint: Checkpoint) -> Iterator[None]:
    """CheckpointError for whatever a model's own code raises that reads sizes which are not narrowed."""
    try:
        yield
    except HeadscopeError:
        raise
    except Exception as error:
        detail = " ".join(str(error).split())[:160] or type(error).__name__
        raise CheckpointError(
            f"heads of model type {checkpoint.model_type!r} cannot be removed: its code does not run with fewer "
            f"({detail}); --export masked may do"
        ) from error


def require(difference: float, tolerance: float, what: str, *, merges: bool) -> None:
    """CheckpointError where a difference to the model with heads masked, or (`merges`) averaged, is too large."""
    if not difference <= tolerance:
        whole = "its key/value heads averaged in place" if merges else "these heads masked"
        advice = "" if merges else ". --export masked may do"
        raise CheckpointError(
            f"{what} computes something else than the whole model with {whole} (logits differ by "
            f"{difference:.1e}, at most {tolerance:.0e} is let pass); nothing was saved{advice}"
        )


# Through the key/value cache.


def _cached(checkpoint: Checkpoint, shrunk: Checkpoint, heads: Sequence[HeadId], batch: ModelInputs) -> float | None:
    """Differences of the same text fed in two parts; None for models that keep no cache."""
    first = {name: values[:1] for name, values in batch.arguments.items()}
    single = ModelInputs(first, None if batch.real is None else batch.real[:1])
    if single.real is not None:
        single = _unpadded(single)
    if isinstance(shrunk.model, Transformer):
        logits = _stepped(shrunk.model, single)
    elif _continues(checkpoint, single):
        with through_attend(shrunk.model):
            logits = _in_parts(shrunk.model, single)
    else:
        return None
    return max_abs_difference(logits, reference(checkpoint, heads, single))


def _unpadded(single: ModelInputs) -> ModelInputs:
    """One sentence without its padding, which is on the right."""
    assert single.real is not None
    arguments = {}
    for name, values in single.arguments.items():
        mask = name if "mask" in name else {"input_ids": "attention_mask"}.get(name, f"{name}_mask")
        mask = "decoder_attention_mask" if name == "decoder_input_ids" else mask
        arguments[name] = values[:, : int(single.arguments[mask].sum())] if mask in single.arguments else values
    return ModelInputs(arguments, single.real[:, : int(single.real.sum())])


def _continues(checkpoint: Checkpoint, single: ModelInputs) -> bool:
    """Whether the architecture gives the same for a text in two parts as for the whole text."""
    ids = [values for name, values in single.arguments.items() if name.endswith("input_ids")]
    if not decodes_from_cache(checkpoint) or ids[-1].shape[1] < 2:
        return False
    with through_attend(checkpoint.model):
        try:
            parts = _in_parts(checkpoint.model, single)
        except Exception:  # it hands no cache on (RecurrentGemma), or wants a text one token at a time after the first
            return False
        return max_abs_difference(parts, outputs(checkpoint.model, single)) <= 1e-3


def decodes_from_cache(checkpoint: Checkpoint) -> bool:
    """Whether a transformers model writes text from a cache of keys and values."""
    model: Any = checkpoint.model
    sites = {attention_site.site for attention_site in checkpoint.attention_sites.order}
    return Site.DECODER_SELF in sites and callable(getattr(model, "can_generate", None)) and model.can_generate()


def _in_parts(model: Any, single: ModelInputs) -> Tensor:
    """Outputs [n V] of a transformers model that reads the first half of a text, then the rest."""
    source, more = dict(single.arguments), dict[str, Any]()
    name = "decoder_input_ids" if "decoder_input_ids" in source else "input_ids"
    ids = source.pop(name)
    source.pop("decoder_attention_mask", None)
    with torch.no_grad():
        if name == "decoder_input_ids":
            mask = {name: source[name] for name in ("attention_mask",) if name in source}
            more = {"encoder_outputs": model.get_encoder()(**source), **mask}
        half = max(ids.shape[1] // 2, 1)
        start, cache = with_cache(model, **{name: ids[:, :half]}, **more)
        if half == ids.shape[1]:
            logits: Tensor = start.logits[0]
            return logits
        rest, _ = with_cache(model, cache, **{name: ids[:, half:]}, **more)
    return torch.cat([start.logits, rest.logits], dim=1)[0]


def _stepped(model: Transformer, single: ModelInputs) -> Tensor:
    """Outputs [n V] of a native model that decodes step by step."""
    target = single.arguments["target"]
    with torch.no_grad():
        state = model.begin(single.arguments["source"] if model.encoder is not None else target[:, :1])
        return torch.cat([model.step(target[:, step], state) for step in range(target.shape[1])])


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
    if isinstance(checkpoint.model, Transformer) or not decodes_from_cache(checkpoint):
        return []
    model: Any = checkpoint.model
    every = data.feeds[0].arguments.items()
    source = {name: rows[:sentences] for name, rows in every if not name.startswith("decoder_")}
    if not checkpoint.two_sided:  # the same length for all: padding on the right would stand inside
        width = max(int(source["attention_mask"].sum(dim=1).min()), 1)
        source = {name: values[:, :width] for name, values in source.items()}
    settings = {"num_beams": beam, "max_new_tokens": NEW, "do_sample": False, "early_stopping": beam > 1}
    settings |= {"min_new_tokens": NEW} if exact else {}
    with torch.no_grad(), suppress_warnings(), threads_for_pass(model, beam * sentences):
        try:
            ids: list[list[int]] = model.generate(**source, **settings).tolist()
        except IndexError:  # transformers cannot: its cache has as many layers as the encoder, a T5's decoder more
            return []
    return list(ids)


def parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(parameter.numel() for parameter in model.parameters())
