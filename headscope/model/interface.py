"""`attend` as an attention implementation of transformers 5.

Registered once, on import, through `AttentionInterface` and its mask twin `AttentionMaskInterface`; a
model uses it only while its `attn_implementation` is "headscope" (see `through_attend`). The mask twin is
the one of eager attention: padding, causality and sliding windows all arrive in one additive mask. Where no weights are
made (`headscope.model.streaming`) that mask is lazy: a function of blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from headscope.errors import CheckpointError
from headscope.model.attention import attend, makes_weights
from headscope.model.streaming.visibility import LazyMask, Spans, spans_of

NAME = "headscope"

# Arguments that models pass and that eager attention ignores too: their effect is in the mask.
_WITHOUT_EFFECT = frozenset(
    [
        "is_causal",
        "sliding_window",
        "position_ids",
        "cache_position",
        "position_embeddings",
        "use_cache",
        "past_key_values",
        "cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "deterministic",
        "num_items_in_batch",
        "output_router_logits",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "layer_idx",
        "token_type_ids",
        "encoder_hidden_states",
        "encoder_attention_mask",
        "logits_to_keep",
    ]
)

_INSIDE: ContextVar[Mapping[int, str]] = ContextVar("headscope_implementations", default=MappingProxyType({}))
_HEAD_MASKS = frozenset({"head_mask", "decoder_head_mask", "cross_attn_head_mask"})


def attend_interface(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    s_aux: Tensor | None = None,
    **extra: Any,
) -> tuple[Tensor, Tensor | None]:
    """The signature that transformers calls: query [b h t k], key and value [b g s k].

    Returns the context as [b t h k] and the weights [b h t s], or None where none are made. CheckpointError names an
    argument that is neither handled here nor known to be without effect.
    """
    refuse_head_masks(extra)
    for name, argument in extra.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            raise CheckpointError(
                f"{type(module).__name__} passes {name!r} to its attention, which headscope does not know; "
                "this model cannot be analysed without giving wrong numbers"
            )
    context, weights = attend(
        module,
        query,
        key,
        value,
        mask=attention_mask,
        scaling=scaling,
        softcap=softcap,
        position_bias=position_bias,
        sinks=s_aux,
        dropout=dropout,
    )
    return context.transpose(1, 2).contiguous(), weights


def refuse_head_masks(arguments: Mapping[str, Any]) -> None:
    """CheckpointError for the head masks of transformers 4, which transformers 5 ignores silently."""
    for name in _HEAD_MASKS & arguments.keys():
        if arguments[name] is not None:
            raise CheckpointError(
                f"{name}= was given, which transformers 5 ignores; "
                "gate heads with `with headscope.model.taps.gated(model, …)` instead"
            )


def refuse_recomputation(model: nn.Module) -> None:
    """CheckpointError for gradient checkpointing: layers would run again in a backward pass after the block."""
    if any(getattr(part, "gradient_checkpointing", False) and part.training for part in model.modules()):
        raise CheckpointError(
            "gradient checkpointing runs layers a second time, out of sight of capture and gates; "
            "turn it off, or call model.eval() first"
        )


def mask_interface(**arguments: Any) -> Tensor | None:
    """The mask of eager attention, with the arguments that transformers gives; lazy where no weights are made."""
    if makes_weights():
        dense: Tensor | None = eager_mask(**arguments)
        return dense
    device = torch.device(arguments.get("device", "cpu"))
    whole = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = [int(arguments[name]) for name in ("batch_size", "q_length", "kv_length")]
    query_offset, key_offset = (arguments.get(name, 0) for name in ("q_offset", "kv_offset"))

    def block(queries: slice, keys: slice) -> Tensor:
        part = {
            "q_length": queries.stop - queries.start,
            "kv_length": keys.stop - keys.start,
            "q_offset": query_offset + queries.start,
            "kv_offset": key_offset + keys.start,
        }
        visible: Tensor | None = sdpa_mask(**{**whole, **part})
        assert visible is not None
        return visible

    return LazyMask(
        block,
        (sizes[0], 1, sizes[1], sizes[2]),
        dtype=arguments.get("dtype", torch.float32),
        device=device,
        known=_known_spans(arguments, sizes),
    )


def _known_spans(arguments: Mapping[str, Any], sizes: list[int]) -> Spans | None:
    """Spans of the two common masks, padding included, without a look at every cell; None for all others."""
    function = arguments.get("mask_function", causal_mask_function)
    if function not in (causal_mask_function, bidirectional_mask_function):
        return None
    b, t, s = sizes
    offset = int(arguments.get("q_offset", 0)) - int(arguments.get("kv_offset", 0))
    queries = torch.arange(1, t + 1) + offset
    ends = (queries if function is causal_mask_function else torch.full_like(queries, s)).expand(b, -1)
    spans = Spans(torch.zeros_like(ends), ends.clamp(0, s))
    padding = arguments.get("attention_mask")
    if padding is None:
        return spans
    if padding.ndim != 2 or padding.shape[1] != s or int(arguments.get("kv_offset", 0)):
        return None
    keys = spans_of(padding)
    return None if keys is None else spans.clipped(keys)


AttentionInterface.register(NAME, attend_interface)
AttentionMaskInterface.register(NAME, mask_interface)


@contextmanager
def through_attend(model: nn.Module, *, implementation: str = NAME) -> Iterator[None]:
    """Within the block a transformers model computes attention with `attend`; its implementation is restored after.

    A native model calls `attend` anyway and is not changed. A block within a block does not list the model's modules
    again, which would be noticeable in a pass over a small batch.
    """
    if not isinstance(model, PreTrainedModel):
        yield
        return
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
    waiting: list[Any] = [part.config for part in model.modules() if isinstance(part, PreTrainedModel)]
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
