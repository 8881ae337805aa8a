"""Contexts by fused attention, or in blocks of queries where no kernel knows the formula; no weights are kept.

`with streaming():` makes every `attend` compute its contexts so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from headscope.model.attention import (
    AttentionCall,
    ScoreOptions,
    dense_context,
    makes_weights,
    repeat_groups,
    replace_contexts,
)
from headscope.model.streaming.scores import ScoreBlocks
from headscope.model.streaming.visibility import Visibility, query_blocks

QUERIES = 512
"""Queries of a block that goes through a fused kernel with a mask of its own, at most."""
MASK = 16
"""Bytes for each cell of such a mask: itself, and what the kernel makes of it."""
TENSORS = 4
"""As large as a block of scores that are there with it, itself among them: where there is no kernel."""


@contextmanager
def streaming() -> Iterator[None]:
    """Within the block `attend` makes no weights; its calls say `weights` only where somebody computes them."""
    with replace_contexts(streamed_context):
        yield


def streamed_context(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """weights · value [b h t k] for query [b h t k], key and value [b g s k], as `attend` defines them."""
    visibility = Visibility.of(options.mask, (len(query), query.shape[2], key.shape[2]), device=query.device)
    plain = options.softcap is None and options.position_bias is None and options.sinks is None
    if plain and value.shape[-1] == query.shape[-1] and query.shape[1]:
        return _Fused(query, key, value, options.scaling).context(visibility)
    return _in_blocks(ScoreBlocks.of(query, key, visibility, options), value)


def recomputed_context(call: AttentionCall, *, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context [b h t k] that a call would give with these query [b h t k], key and value [b g s k].

    Computed as calls are computed here: with weights, or without within `streaming`.
    """
    if makes_weights():
        return dense_context(call.module, query, key, value, call.options)[0]
    return streamed_context(query, key, value, call.options)


@dataclass(frozen=True)
class _Fused:
    """torch's fused attention, which is memory-efficient where it gets no mask, or one for few queries."""

    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float | None

    def context(self, visibility: Visibility) -> Tensor:
        b, t, s = visibility.shape
        if visibility.is_full:
            return self._attend(slice(0, t), slice(0, s))
        if visibility.is_causal:
            return self._attend(slice(0, t), slice(0, s), causal=True)
        parts = []
        for queries in query_blocks(t, b * s * MASK, at_most=QUERIES):
            low, all_low, all_high, high = visibility.bounds(queries)
            keys = slice(low, high)
            mask = visibility.kernel_mask(queries, keys) if low < all_low or all_high < high else None
            parts.append(self._attend(queries, keys, mask))
        return torch.cat(parts, dim=2)

    def _attend(self, queries: slice, keys: slice, mask: Tensor | None = None, *, causal: bool = False) -> Tensor:
        grouped = self.key.shape[1] != self.query.shape[1]
        return scaled_dot_product_attention(
            self.query[:, :, queries],
            self.key[:, :, keys],
            self.value[:, :, keys],
            attn_mask=mask,
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=grouped,
        )


def _in_blocks(scores: ScoreBlocks, value: Tensor) -> Tensor:
    """By the formula, block by block; where gradients are wanted each block is computed again in the backward pass."""

    def part(queries: slice) -> Tensor:
        weights, keys = scores.weights(queries)
        return torch.matmul(weights.to(value.dtype), repeat_groups(value[:, :, keys], weights.shape[1]))

    blocks = scores.blocks(TENSORS)
    if torch.is_grad_enabled() and (scores.query.requires_grad or value.requires_grad):
        return torch.cat([checkpoint(part, queries, use_reentrant=False) for queries in blocks], dim=2)
    return torch.cat([part(queries) for queries in blocks], dim=2)
