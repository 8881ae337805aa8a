"""A text read in parts through the cache of keys and values: what a model gives then, and how far that is off."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headscope.heads import HeadId
from headscope.model.forward import ModelInputs, Runnable, max_abs_difference, outputs, reference, with_cache
from headscope.model.interface import through_attend
from headscope.model.native.transformer import Transformer

SAME = 1e-3
"""Logits of a text in two parts that are those of the whole text, of an architecture that reads it in parts at all."""


def cached_difference(whole: Runnable, smaller: nn.Module, heads: Iterable[HeadId], batch: ModelInputs) -> float | None:
    """How far a sentence read in parts by a smaller model is from the whole model's outputs with `heads` masked.

    Returns None for models that keep no cache, and for architectures that give something else for a text in parts.
    """
    single = _first_sentence(batch)
    if isinstance(smaller, Transformer):
        logits = _stepped(smaller, single)
    elif generates(whole.model) and _continues(whole.model, single):
        with through_attend(smaller):
            logits = _in_halves(smaller, single)
    else:
        return None
    return max_abs_difference(logits, reference(whole, heads, single))


def generates(model: Any) -> bool:
    """Whether a transformers model writes text, which it does from a cache of keys and values."""
    return callable(getattr(model, "can_generate", None)) and bool(model.can_generate())


def _first_sentence(batch: ModelInputs) -> ModelInputs:
    """One sentence without its padding, which is on the right."""
    first = {name: values[:1] for name, values in batch.arguments.items()}
    if batch.real is None:
        return ModelInputs(first, None)
    arguments = {}
    for name, values in first.items():
        mask = name if "mask" in name else {"input_ids": "attention_mask"}.get(name, f"{name}_mask")
        mask = "decoder_attention_mask" if name == "decoder_input_ids" else mask
        arguments[name] = values[:, : int(first[mask].sum())] if mask in first else values
    return ModelInputs(arguments, batch.real[:1, : int(batch.real[:1].sum())])


def _continues(model: nn.Module, single: ModelInputs) -> bool:
    """Whether the architecture gives the same for a text in two parts as for the whole text."""
    ids = [values for name, values in single.arguments.items() if name.endswith("input_ids")]
    if ids[-1].shape[1] < 2:
        return False
    with through_attend(model):
        try:
            parts = _in_halves(model, single)
        except Exception:  # it hands no cache on (RecurrentGemma), or wants a text one token at a time after the first
            return False
        return max_abs_difference(parts, outputs(model, single)) <= SAME


def _in_halves(model: Any, single: ModelInputs) -> Tensor:
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
    target = single.arguments["target"]
    with torch.no_grad():
        state = model.begin(single.arguments["source"] if model.encoder is not None else target[:, :1])
        return torch.cat([model.step(target[:, step], state) for step in range(target.shape[1])])
