"""Scores and weights of long texts, a block of queries at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.model.attention import ScoreOptions, precise_type
from headscope.model.streaming.visibility import AT_A_TIME, Visibility

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
