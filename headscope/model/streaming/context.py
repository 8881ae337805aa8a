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
    precise_type,
    repeat_groups,
    replace_contexts,
)
from headscope.model.streaming.visibility import AT_A_TIME, Visibility, query_blocks

WIDTHS = 1024
"""Blocks have a multiple of so many keys: memory of one size is used again, of sizes that grow the heap would."""
PLACES = 72
"""Bytes for what is visible in a cell of a block, for a pattern in it, and on the way to both."""


@dataclass(frozen=True)
class ScoreBlocks:
    """query [b h t k] (scaled already) and key [b g s k], of which blocks of scores [b h q n] are made.

    `softcap` and `position_bias` (broadcasts to [b h t s]) are those of `headscope.model.attention.attention_scores`,
    `sinks` [h] those of `attention_weights`.
    """

    query: Tensor
    key: Tensor
    visibility: Visibility
    softcap: float | None = None
    position_bias: Tensor | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, query: Tensor, key: Tensor, visibility: Visibility, options: ScoreOptions) -> ScoreBlocks:
        """From a call's own query and key: the query is scaled once."""
        dtype = precise_type(query.dtype)
        scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        sinks = None if options.sinks is None else options.sinks.to(dtype)
        bias = options.position_bias
        return cls(query.to(dtype) * scale, key.to(dtype), visibility, options.softcap, bias, sinks)

    def blocks(self, tensors: int) -> Iterator[slice]:
        """Blocks of queries, for so many tensors as large as a block of scores: more where they see fewer keys.

        Blocks of one size fit in the memory of those before them.
        """
        b, h, t, _ = self.query.shape
        cells = AT_A_TIME // (b * (tensors * h * self.query.itemsize + PLACES))
        start, least = 0, max(1, cells // self.key.shape[2])
        while start < t:
            size = least
            for _ in range(2):  # the second time no block of that size sees more keys than it was made for
                keys = self._keys(slice(start, min(start + size, t)))
                size = max(least, cells // max(1, keys.stop - keys.start))
            yield slice(start, min(start + size, t))
            start += size

    def _keys(self, queries: slice) -> slice:
        """The keys that any of a block's queries sees, and a few more."""
        low, _, _, high = self.visibility.bounds(queries)
        return slice(low, min(self.key.shape[2], low - (low - high) // WIDTHS * WIDTHS))

    def weights(self, queries: slice) -> tuple[Tensor, slice]:
        """The weights [b h q n] of a block of queries, and n keys, with those that any of them sees."""
        low, all_low, all_high, _ = self.visibility.bounds(queries)
        keys = self._keys(queries)
        block = self._scores(queries, keys)
        first = all_high if low >= all_low and all_high > low else low  # all queries see the keys before it
        if first == low or block.requires_grad:
            block = self.visibility.hide(block, queries, keys)
        elif first < keys.stop:
            self.visibility.hide(block[..., first - low :], queries, slice(first, keys.stop))  # in place
        if self.sinks is None:
            return torch.softmax(block, dim=-1), keys
        column = self.sinks[:, None, None].expand(*block.shape[:-1], 1)
        return torch.softmax(torch.cat([block, column], dim=-1), dim=-1)[..., :-1], keys

    def _scores(self, queries: slice, keys: slice) -> Tensor:
        b, h, t, k = self.query.shape
        g = self.key.shape[1]
        rows = self.query[:, :, queries].reshape(b, g, -1, k)  # [b g h/g·q k]: a group's keys are read once
        products = rows @ self.key[:, :, keys].transpose(-1, -2)
        scores = products.view(b, h, -1, products.shape[-1])
        if self.softcap is not None:
            scores = torch.tanh(scores / self.softcap) * self.softcap  # not in place: it may need a gradient
        if self.position_bias is not None:
            bias = self.position_bias.expand(-1, -1, t, self.key.shape[2])
            scores = scores + bias[:, :, queries, keys]
        return scores


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
        has_groups = self.key.shape[1] != self.query.shape[1]
        return scaled_dot_product_attention(
            self.query[:, :, queries],
            self.key[:, :, keys],
            self.value[:, :, keys],
            attn_mask=mask,
            is_causal=causal,
            scale=self.scaling,
            enable_gqa=has_groups,
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
