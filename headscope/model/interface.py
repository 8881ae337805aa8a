"""Which models compute attention with `attend` and when; what such a model refuses; what its config says of its input.

Native models call `attend` themselves. Those of transformers do within `through_attend`, by the implementation of
`headscope.model.transformers_attention`, which is imported with the first of them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from headscope.errors import CheckpointError
from headscope.model.transformers_models import IMPLEMENTATION, is_pretrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSIDE: ContextVar[Mapping[int, str]] = ContextVar("headscope_implementations", default=MappingProxyType({}))


def refuse_recomputation(model: nn.Module) -> None:
    """CheckpointError for gradient checkpointing: layers would run again in a backward pass after the block."""
    if any(getattr(part, "gradient_checkpointing", False) and part.training for part in model.modules()):
        raise CheckpointError(
            "gradient checkpointing runs layers a second time, out of sight of capture and gates; "
            "turn it off, or call model.eval() first"
        )


@contextmanager
def through_attend(model: nn.Module, *, implementation: str = IMPLEMENTATION) -> Iterator[None]:
    """Within the block a transformers model computes attention with `attend`; its implementation is restored after.

    A native model calls `attend` anyway and is not changed. A block within a block does not list the model's modules
    again, which would be noticeable in a pass over a small batch.
    """
    if not is_pretrained(model):
        yield
        return
    import headscope.model.transformers_attention  # noqa: F401  # registers IMPLEMENTATION

    inside = _INSIDE.get()
    if inside.get(id(model)) == implementation == model.config._attn_implementation:
        yield
        return
    before = _implementations(model)
    token = _INSIDE.set({**inside, id(model): implementation})
    try:
        if any(name != implementation for _, name in before):
            model.set_attn_implementation(implementation)
        yield
    finally:
        _INSIDE.reset(token)
        for config, name in before:
            config._attn_implementation_internal = name


def _implementations(model: PreTrainedModel) -> list[tuple[Any, str | None]]:
    """Every config object inside the model, at any depth, with the implementation it asks for."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [part.config for part in model.modules() if is_pretrained(part)]
    while waiting:
        config = waiting.pop()
        if config is not None and id(config) not in configs:
            configs[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return [(config, config._attn_implementation) for config in configs.values()]


def why_no_call(config: Any, kind: str) -> str:
    """Why no call of attention came: the config's `layer_types` are of other kinds, or its code goes another way."""
    kinds = list(dict.fromkeys(getattr(getattr(config, "text_config", config), "layer_types", None) or ()))
    if kinds and not any("attention" in name and name != "linear_attention" for name in map(str, kinds)):
        return (
            f"model type {kind!r} has no layer of softmax attention here: all its layers are {' or '.join(kinds)} "
            "(layer_types in its config), so there are no heads to see or gate"
        )
    return (
        f"model type {kind!r} computes attention, if any, in its own code and never calls the attention "
        "interface of transformers 5; headscope cannot see or gate its heads"
    )


def advice(base: nn.Module) -> str:
    """What of a model (without its task head) may be opened instead: a part that transformers can save by itself."""
    parts = [name for name, part in base.named_children() if _stands_alone(part)]
    if not parts:
        return "it is not supported"
    others = "".join(f" or model.{name}" for name in parts[1:])
    return f"open a part of it: save model.{parts[0]}{others} with save_pretrained, and the tokenizer"


def _stands_alone(part: nn.Module) -> bool:
    config: Any = getattr(part, "config", None)
    attends_outside = getattr(config, "add_cross_attention", False)
    readable = getattr(part, "main_input_name", "") in ("input_ids", "pixel_values")
    return hasattr(part, "save_pretrained") and readable and not attends_outside


@contextmanager
def suppress_warnings() -> Iterator[None]:
    """Within the block transformers and what it calls log nothing: it warns of models that lack the implementation."""
    loggers = [logging.getLogger(name) for name in ("transformers", "huggingface_hub", "accelerate", "bitsandbytes")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# Models that write text for sound as Whisper does: always as many frames, halved by convolutions to positions.


def reads_sound(model: nn.Module) -> bool:
    """Whether an encoder reads features of sound [b bins frames] of one fixed length, and a decoder writes text."""
    config: Any = getattr(model, "config", None)
    sizes = all(isinstance(getattr(config, name, None), int) for name in ("num_mel_bins", "max_source_positions"))
    return sizes and getattr(model, "main_input_name", "") == "input_features" and bool(config.is_encoder_decoder)


def features_shape(config: Any) -> tuple[int, int, int]:
    """Shape [1 bins frames] of the features of one recording: two frames for each position of the encoder."""
    return 1, config.num_mel_bins, 2 * config.max_source_positions
