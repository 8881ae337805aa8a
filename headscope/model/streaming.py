"""Attention of long texts without the matrix of weights: contexts, and statistics of its rows, in linear memory.

Masks [b 1 t s] are made for one block of queries at a time: a whole mask of 32,000 positions takes four GB. Contexts
come from fused attention, or block by block where no kernel has the formula; the tensors of a block stay within a byte
budget. Within `with streaming():` every `attend` computes its context like this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from headscope.distributed import upload
from headscope.model.attention import (
    CONTEXTS,
    AttentionCall,
    ScoreOptions,
    dense_context,
    holding,
    makes_weights,
    precise_type,
    repeat_groups,
)

BUDGET = 128 * 2**20
"""Bytes that streamed attention takes beside the model's own states: for blocks, and for tensors that outlive them."""
BLOCK_BYTES = BUDGET // 2  # of all tensors of one block
MIN_QUERIES = 1  # queries of a block, however many bytes one takes


def query_blocks(queries: int, bytes_each: int, *, at_most: int | None = None) -> Iterator[slice]:
    """Consecutive blocks of queries of `bytes_each` that fit in `BLOCK_BYTES`, with `at_most` so many queries each."""
    step = min(max(MIN_QUERIES, BLOCK_BYTES // max(1, bytes_each)), at_most or queries)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


CPU = torch.device("cpu")
SCAN_BYTES = 8  # per cell of a mask whose spans are searched: the cell, and copies of it


@dataclass(frozen=True)
class Spans:
    """Contiguous keys that each query sees: from `first` [b t] to before `end` [b t].

    Both are on the CPU, where bounds of blocks are read, whatever device the model is on.
    """

    first: Tensor
    end: Tensor
    copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, compare=False)

    def clip(self, keys: Spans) -> Spans:
        """The intersection with spans of keys [b 1]; empty where the two do not overlap."""
        first = torch.maximum(self.first, keys.first)
        return Spans(first, torch.maximum(first, torch.minimum(self.end, keys.end)))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First keys and ends [b t] on a device."""
        if device not in self.copies:
            self.copies[device] = (upload(self.first, device), upload(self.end, device))
        return self.copies[device]


class LazyMask(Tensor):
    """An additive mask [b 1 t s] without storage: `block(queries, keys)` makes a part of it, True for visible.

    Any torch operation on it makes the whole mask first, so a model that computes with its mask gets correct results
    (and needs the memory for them).
    """

    block: Callable[[slice, slice], Tensor]
    """From a slice of queries and one of keys, each with start and stop: [b 1 q s] boolean."""
    known_spans: Spans | None

    @staticmethod
    def __new__(
        cls,
        block: Callable[[slice, slice], Tensor],
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        spans: Spans | None = None,
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        mask.block, mask.known_spans = block, spans
        return mask

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"LazyMask({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        arguments = tree_map(_materialize, (tuple(args), dict(kwargs or {})))
        return func(*arguments[0], **arguments[1])

    @cached_property
    def spans(self) -> Spans | None:
        """The visible keys of every query as a span; None if some query's keys are not contiguous."""
        if self.known_spans is not None:
            return self.known_spans
        b, _, t, s = self.shape
        return _spans(self.block(queries, slice(0, s))[:, 0] for queries in query_blocks(t, b * s * SCAN_BYTES))


def causal_mask(positions: int, real: Tensor | None, *, device: torch.device) -> LazyMask:
    """The mask of causal self attention that also hides padding: keys that are not `real` [b s]."""
    b = 1 if real is None else len(real)

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
        visible = (columns <= rows[:, None]).expand(b, 1, -1, -1)
        return visible if real is None else visible & real.bool()[:, None, None, keys]

    all_spans = Spans(*(torch.tensor([[end]]) for end in (0, positions)))
    of_keys = all_spans if real is None else spans_of(real)
    ends = torch.arange(1, positions + 1).expand(b, -1)
    spans = None if of_keys is None else Spans(torch.zeros_like(ends), ends).clip(of_keys)
    return LazyMask(block, (b, 1, positions, positions), dtype=torch.float32, device=device, spans=spans)


def spans_of(real: Tensor) -> Spans | None:
    """The real keys [b s] of every sentence as one span [b 1]. Returns None if padding lies between them."""
    return _spans([real.bool()[:, None]])


def _spans(blocks: Iterable[Tensor]) -> Spans | None:
    """Spans of a visibility mask [b t s], given in blocks of queries. Returns None if visible keys have gaps.

    From a device the bounds of all blocks are copied at once; on a CPU the first gap ends the loop.
    """
    bounds_by_block = []
    for visible in blocks:
        bounds = [visible.sum(dim=-1), *(part.to(torch.uint8).argmax(dim=-1) for part in (visible, visible.flip(-1)))]
        bounds_by_block.append(torch.stack([*bounds, torch.full_like(bounds[0], visible.shape[-1])]))  # [4 b q]
        if visible.device.type == "cpu" and _have_gaps(bounds_by_block[-1]):
            return None
    all_bounds = torch.cat(bounds_by_block, dim=2).cpu()  # [4 b t]
    count, first, *_ = all_bounds
    return None if _have_gaps(all_bounds) else Spans(first, first + count)


def _have_gaps(bounds: Tensor) -> bool:
    """Whether some query's visible keys have gaps, from [4 b q]: their count, first, last from the end, all keys."""
    count, first, from_end, size = bounds
    return bool(((count > 0) & (size - from_end - first != count)).any())


def _materialize(value: Any) -> Any:
    """The whole additive mask of a `LazyMask`; any other value as it is."""
    if not isinstance(value, LazyMask):
        return value
    visible = value.block(*(slice(0, size) for size in value.shape[-2:]))
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    return torch.where(visible, zero, torch.finfo(value.dtype).min)


HIDDEN = -1e30  # the score of a hidden key: far below every other score, and finite, so that its product with 0 is 0


@dataclass(frozen=True)
class Visibility:
    """The visible keys of t queries among s keys: `spans` where they are contiguous, else a `mask`.

    `shape` is (b, t, s). `mask` broadcasts to [b h t s]: additive, or boolean with True for visible; without `spans`
    None means that every key is visible. Results of methods are on `device`.
    """

    shape: tuple[int, int, int]
    spans: Spans | None = None
    mask: Tensor | None = None
    device: torch.device = CPU

    @classmethod
    def of(cls, mask: Tensor | None, shape: tuple[int, int, int], *, device: torch.device = CPU) -> Visibility:
        """The visible keys under a model's mask; `shape` is b, t, s."""
        if isinstance(mask, LazyMask):
            return cls(shape, mask.spans, None if mask.spans else mask, device)
        if mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
            of_keys = spans_of(mask[:, 0, 0])
            if of_keys is not None:
                ends = (end.expand(shape[0], shape[1]) for end in (of_keys.first, of_keys.end))
                return cls(shape, Spans(*ends), device=device)
        return cls(shape, None, mask, device)

    @cached_property
    def is_causal(self) -> bool:
        """Whether every query sees itself and all keys before it, and nothing else."""
        if self.spans is None or self.shape[1] != self.shape[2]:
            return False
        ends = torch.arange(1, self.shape[1] + 1)
        return bool(((self.spans.first == 0) & (self.spans.end == ends)).all())

    @cached_property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        if self.spans is None:
            return self.mask is None
        return bool(((self.spans.first == 0) & (self.spans.end == self.shape[2])).all())

    def bounds(self, queries: slice) -> tuple[int, int, int, int]:
        """low, all_low, all_high, high of a block of queries: keys outside low:high are seen by none of them.

        Keys in all_low:all_high are seen by all of them.
        """
        s = self.shape[2]
        if self.spans is None:
            return (0, 0, s, s) if self.mask is None else (0, s, 0, s)
        first, end = self.spans.first[:, queries], self.spans.end[:, queries]
        sees = end > first
        if not bool(sees.any()):
            return 0, s, 0, 1
        return int(first.where(sees, s).min()), int(first.max()), int(end.min()), int(end.max())

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """Whether each query sees each key: [b 1 q n] boolean, or [1 1 q n] where all sentences have one mask."""
        b, t, s = self.shape
        if self.spans is not None:
            n = torch.arange(keys.start, keys.stop, device=self.device)
            first, end = (bound[:, None, queries, None] for bound in self.spans.on(self.device))
            return (n >= first) & (n < end)
        if isinstance(self.mask, LazyMask):
            return self.mask.block(queries, keys)
        if self.mask is None:
            sizes = (queries.stop - queries.start, keys.stop - keys.start)
            return torch.ones(b, 1, *sizes, dtype=torch.bool, device=self.device)
        part = self.mask.expand(-1, -1, t, s)[:, :1, queries, keys]
        return part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2

    def hide(self, scores: Tensor, queries: slice, keys: slice) -> Tensor:
        """Scores [b h q n] with the mask applied: `HIDDEN` for hidden keys."""
        additive = self.additive(queries, keys)
        if additive is not None:
            return (scores + additive).clamp(min=HIDDEN)
        hidden = ~self.visible(queries, keys)
        return scores.masked_fill(hidden, HIDDEN) if scores.requires_grad else scores.masked_fill_(hidden, HIDDEN)

    def additive(self, queries: slice, keys: slice) -> Tensor | None:
        """The part [b h q n] of an additive mask, which may hold biases. Returns None if the mask is not additive."""
        mask = self.mask
        if self.spans is not None or mask is None or isinstance(mask, LazyMask) or mask.dtype == torch.bool:
            return None
        return mask.expand(-1, -1, *self.shape[1:])[:, :, queries, keys]


KEY_MULTIPLE = 1024
"""Blocks have a multiple of so many keys: memory of equal size is reused, ever larger blocks would grow the heap."""
CELL_BYTES = 72  # per cell of a block: its visibility, a pattern of an analysis, and temporary copies of both


@dataclass(frozen=True)
class ScoreBlocks:
    """Blocks of scores [b h q n], made on demand from query [b h t k] (already scaled) and key [b g s k].

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
        """The blocks of an attention call, whose query is scaled here, once."""
        dtype = precise_type(query.dtype)
        scale = query.shape[-1] ** -0.5 if options.scaling is None else options.scaling
        sinks = None if options.sinks is None else options.sinks.to(dtype)
        bias = options.position_bias
        return cls(query.to(dtype) * scale, key.to(dtype), visibility, options.softcap, bias, sinks)

    def blocks(self, tensors: int) -> Iterator[slice]:
        """Slices of queries such that `tensors` tensors of the size of a block's scores fit in `BLOCK_BYTES`.

        A block has more queries where these see fewer keys.
        """
        b, h, t, _ = self.query.shape
        cells = BLOCK_BYTES // (b * (tensors * h * self.query.itemsize + CELL_BYTES))
        start, min_queries = 0, max(MIN_QUERIES, cells // self.key.shape[2])
        while start < t:
            size = min_queries
            for _ in range(2):  # again for the larger block, which may see more keys: then it has fewer queries
                keys = self._keys(slice(start, min(start + size, t)))
                size = max(min_queries, cells // max(1, keys.stop - keys.start))
            yield slice(start, min(start + size, t))
            start += size

    def _keys(self, queries: slice) -> slice:
        """The keys that any query of a block sees, and a few more up to a multiple of `KEY_MULTIPLE`."""
        low, _, _, high = self.visibility.bounds(queries)
        return slice(low, min(self.key.shape[2], low - (low - high) // KEY_MULTIPLE * KEY_MULTIPLE))

    def weights(self, queries: slice) -> tuple[Tensor, slice]:
        """The weights [b h q n] of a block of queries on n keys, and the slice of these keys: all that they see."""
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


MAX_MASKED_QUERIES = 512  # queries of a block that goes through a fused kernel with a mask
MASK_BYTES = 16  # per cell of such a mask: the cell, and the kernel's copies of it
TENSORS = 4  # tensors of the size of a block's scores that exist at once where no fused kernel has the formula


def streaming() -> AbstractContextManager[None]:
    """Within the block `attend` makes no weights; a call computes its `weights` only when they are read."""
    return holding(CONTEXTS, streamed_context)


def streamed_context(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """weights · value [b h t k] for query [b h t k], key and value [b g s k], as `attend` defines them."""
    visibility = Visibility.of(options.mask, (len(query), query.shape[2], key.shape[2]), device=query.device)
    plain = options.softcap is None and options.position_bias is None and options.sinks is None
    if plain and value.shape[-1] == query.shape[-1] and query.shape[1]:
        return _fused_context(query, key, value, options.scaling, visibility)
    return _in_blocks(ScoreBlocks.of(query, key, visibility, options), value)


def recomputed_context(call: AttentionCall, *, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context [b h t k] of a call with this query [b h t k], key and value [b g s k] in the place of its own.

    Computed with weights, or without them within `streaming`.
    """
    if makes_weights():
        return dense_context(call.module, query, key, value, call.options)[0]
    return streamed_context(query, key, value, call.options)


def _fused_context(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, visibility: Visibility) -> Tensor:
    """The context by torch's fused attention, which saves memory if it gets no mask, or one for few queries."""
    b, t, s = visibility.shape
    attention = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=key.shape[1] != query.shape[1])
    if visibility.is_full or visibility.is_causal:
        return attention(query, key, value, is_causal=not visibility.is_full)
    parts = []
    for queries in query_blocks(t, b * s * MASK_BYTES, at_most=MAX_MASKED_QUERIES):
        low, all_low, all_high, high = visibility.bounds(queries)
        keys, mask = slice(low, high), None
        if low < all_low or all_high < high:
            mask = visibility.additive(queries, keys)
            if mask is None:  # queries that see no key get all of them: softmax over none would be NaN
                visible = visibility.visible(queries, keys)
                mask = visible | ~visible.any(dim=-1, keepdim=True)
        parts.append(attention(query[:, :, queries], key[:, :, keys], value[:, :, keys], attn_mask=mask))
    return torch.cat(parts, dim=2)


def _in_blocks(scores: ScoreBlocks, value: Tensor) -> Tensor:
    """The context by the formula, block by block; for gradients each block is recomputed in the backward pass."""

    def part(queries: slice) -> Tensor:
        weights, keys = scores.weights(queries)
        return torch.matmul(weights.to(value.dtype), repeat_groups(value[:, :, keys], weights.shape[1]))

    blocks = scores.blocks(TENSORS)
    if torch.is_grad_enabled() and (scores.query.requires_grad or value.requires_grad):
        return torch.cat([checkpoint(part, queries, use_reentrant=False) for queries in blocks], dim=2)
    return torch.cat([part(queries) for queries in blocks], dim=2)
