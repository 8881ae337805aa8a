"""`attend` as an attention implementation of transformers 5.

Importing this module registers it in `AttentionInterface`, and a function for its masks in `AttentionMaskInterface`; a
model uses both only while its `attn_implementation` is "headscope" (see `headscope.model.interface.through_attend`).
The masks are those of eager attention: padding, causality and sliding windows in one additive mask. If attention
weights are not made whole (`headscope.model.streaming`), the mask is lazy: a function that makes blocks of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import (
    AttentionMaskInterface,
    bidirectional_mask_function,
    causal_mask_function,
    eager_mask,
    sdpa_mask,
)

from headscope.errors import CheckpointError
from headscope.model.attention import IMPLEMENTATION, ScoreOptions, attend, makes_weights, refuse_head_masks
from headscope.model.streaming import LazyMask, Spans, spans_of

# Arguments that models pass and that eager attention ignores too: their effect is in the mask.
_WITHOUT_EFFECT = frozenset(
    [
        *("is_causal", "sliding_window", "position_ids", "cache_position", "position_embeddings", "layer_idx"),
        *("use_cache", "past_key_values", "cache", "output_attentions", "output_hidden_states", "return_dict"),
        *("deterministic", "num_items_in_batch", "output_router_logits", "logits_to_keep", "token_type_ids"),
        *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
        *("encoder_hidden_states", "encoder_attention_mask"),
    ]
)


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
    """`attend` with the signature that transformers calls: query [b h t k], key and value [b g s k].

    Returns the context [b t h k], and the weights [b h t s], or None if these are not made whole. CheckpointError names
    an argument that is neither handled here nor known to be without effect.
    """
    refuse_head_masks(extra)
    for name, argument in extra.items():
        if argument is not None and name not in _WITHOUT_EFFECT:
            why = f"passes {name!r} to its attention, which headscope does not know"
            raise CheckpointError(f"{type(module).__name__} {why}; numbers of this model would be wrong")
    options = ScoreOptions(attention_mask, scaling, softcap, position_bias, s_aux)
    context, weights = attend(module, query, key, value, options, dropout=dropout)
    return context.transpose(1, 2).contiguous(), weights


def mask_interface(**arguments: Any) -> Tensor | None:
    """The mask of eager attention, with the arguments that transformers gives; lazy if weights are not made whole."""
    if makes_weights():
        return eager_mask(**arguments)
    device = torch.device(arguments.get("device", "cpu"))
    all_arguments = {**arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    sizes = [int(arguments[name]) for name in ("batch_size", "q_length", "kv_length")]
    query_offset, key_offset = (arguments.get(name, 0) for name in ("q_offset", "kv_offset"))

    def block(queries: slice, keys: slice) -> Tensor:
        part = {
            "q_length": queries.stop - queries.start,
            "kv_length": keys.stop - keys.start,
            "q_offset": query_offset + queries.start,
            "kv_offset": key_offset + keys.start,
        }
        visible: Tensor | None = sdpa_mask(**{**all_arguments, **part})
        assert visible is not None
        return visible

    return LazyMask(
        block,
        (sizes[0], 1, sizes[1], sizes[2]),
        dtype=arguments.get("dtype", torch.float32),
        device=device,
        spans=_known_spans(arguments, sizes),
    )


def _known_spans(arguments: Mapping[str, Any], sizes: list[int]) -> Spans | None:
    """Spans of visible keys for causal and bidirectional masks with padding, without reading every cell; else None."""
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
    return None if keys is None else spans.clip(keys)


AttentionInterface.register(IMPLEMENTATION, attend_interface)
AttentionMaskInterface.register(IMPLEMENTATION, mask_interface)
