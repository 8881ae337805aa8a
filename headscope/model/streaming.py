"""Attention of long texts without the matrix of weights: contexts, and statistics of its rows, in linear memory.

Which keys each query sees is asked for in blocks of queries, of masks [b 1 t s] that are made in blocks: a whole mask
of 32,000 positions has four GB. Contexts come by fused attention, or in blocks where no kernel knows the formula; what
is there for one block at a time keeps within a budget. `with streaming():` makes every `attend` compute them so.
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
"""Bytes that streamed attention takes beside the model's own states: for blocks, and for what is kept between them."""
AT_A_TIME = BUDGET // 2  # bytes of all tensors of one block
MIN_QUERIES = 1  # queries of a block, however much memory one takes


def query_blocks(queries: int, bytes_each: int, *, at_most: int | None = None) -> Iterator[slice]:
    """Blocks of queries in order, each of a given number of bytes and `at_most` so many queries."""
    step = min(max(MIN_QUERIES, AT_A_TIME // max(1, bytes_each)), at_most or queries)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


CPU = torch.device("cpu")
CELL_SCANNED = 8  # bytes for each cell of a mask that is looked at: itself, and the copies of which its ends are found


@dataclass(frozen=True)
class Spans:
    """The keys that each query sees, where they lie side by side: from `first` up to, without it, `end` [b t].

    Both are on the CPU, where bounds of blocks are read, wherever the model is.
    """

    first: Tensor
    end: Tensor
    copies: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, compare=False)

    def clip(self, keys: Spans) -> Spans:
        """Only the keys [b 1] of other spans; empty where these end before the first."""
        first = torch.maximum(self.first, keys.first)
        return Spans(first, torch.maximum(first, torch.minimum(self.end, keys.end)))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First keys and ends [b t] on a device."""
        if device not in self.copies:
            self.copies[device] = (upload(self.first, device), upload(self.end, device))
        return self.copies[device]


class LazyMask(Tensor):
    """An additive mask of the shape [b 1 t s] that has no memory: `block` makes parts of it, True for visible.

    Any operation of torch on it makes the whole mask first, so a model that computes with its mask gets what it expects
    (and needs the memory for it).
    """

    block: Callable[[slice, slice], Tensor]
    """Of queries and keys, as slices with a start and a stop: [b 1 q s] boolean."""
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
        arguments = tree_map(_whole, (tuple(args), dict(kwargs or {})))
        return func(*arguments[0], **arguments[1])

    @cached_property
    def spans(self) -> Spans | None:
        """The visible keys of every query as a span; None if some query's keys are not contiguous."""
        if self.known_spans is not None:
            return self.known_spans
        b, _, t, s = self.shape
        return _spans(self.block(queries, slice(0, s))[:, 0] for queries in query_blocks(t, b * s * CELL_SCANNED))


def causal_mask(positions: int, real: Tensor | None, *, device: torch.device) -> LazyMask:
    """The mask of causal self attention without the keys that are not `real` [b s]."""
    b = 1 if real is None else len(real)

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
        visible = (columns <= rows[:, None]).expand(b, 1, -1, -1)
        return visible if real is None else visible & real.bool()[:, None, None, keys]

    whole = Spans(*(torch.tensor([[end]]) for end in (0, positions)))
    of_keys = whole if real is None else spans_of(real)
    ends = torch.arange(1, positions + 1).expand(b, -1)
    spans = None if of_keys is None else Spans(torch.zeros_like(ends), ends).clip(of_keys)
    return LazyMask(block, (b, 1, positions, positions), dtype=torch.float32, device=device, spans=spans)


def spans_of(real: Tensor) -> Spans | None:
    """The real keys [b s] of every sentence as one span [b 1]. Returns None if padding lies between them."""
    return _spans([real.bool()[:, None]])


def _spans(blocks: Iterable[Tensor]) -> Spans | None:
    """Spans of visible [b t s], which comes in blocks of queries. Returns None if there are gaps.

    A device is read once, when all blocks are through; on a CPU the first gap ends the walk.
    """
    bounds_by_block = []
    for visible in blocks:
        bounds = [visible.sum(dim=-1), *(part.to(torch.uint8).argmax(dim=-1) for part in (visible, visible.flip(-1)))]
        bounds_by_block.append(torch.stack([*bounds, torch.full_like(bounds[0], visible.shape[-1])]))  # [4 b q]
        if visible.device.type == "cpu" and _with_gaps(bounds_by_block[-1]):
            return None
    together = torch.cat(bounds_by_block, dim=2).cpu()
    count, first, *_ = together
    return None if _with_gaps(together) else Spans(first, first + count)


def _with_gaps(bounds: Tensor) -> bool:
    """Whether some query's keys do not lie side by side; of counts, first keys, those from the end, and sizes."""
    count, first, from_end, size = bounds
    return bool(((count > 0) & (size - from_end - first != count)).any())


def _whole(value: Any) -> Any:
    if not isinstance(value, LazyMask):
        return value
    visible = value.block(*(slice(0, size) for size in value.shape[-2:]))
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    return torch.where(visible, zero, torch.finfo(value.dtype).min)


HIDDEN = -1e30  # the score of a key that is not visible: far below every other one, and its products with zero are zero


@dataclass(frozen=True)
class Visibility:
    """The visible keys of t queries among s keys: `spans` where they lie side by side, else by `mask`.

    `mask` broadcasts to [b h t s]: additive, or boolean with True for visible; None: all is visible, or `spans` says
    what is. What is visible is said on `device`.
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
        """Of these queries: the first key that any sees, that all see, the end of those all see, the end of all."""
        s = self.shape[2]
        if self.spans is None:
            return (0, 0, s, s) if self.mask is None else (0, s, 0, s)
        first, end = self.spans.first[:, queries], self.spans.end[:, queries]
        sees = end > first
        if not bool(sees.any()):
            return 0, s, 0, 1
        return int(first.where(sees, s).min()), int(first.max()), int(end.min()), int(end.max())

    def visible(self, queries: slice, keys: slice) -> Tensor:
        """Whether queries see keys: [b 1 q n] boolean, or [1 1 q n] where all sentences are alike."""
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
        """The part [b h q n] of an additive mask, which may hold biases too. Returns None if the mask is none."""
        mask = self.mask
        if self.spans is not None or mask is None or isinstance(mask, LazyMask) or mask.dtype == torch.bool:
            return None
        return mask.expand(-1, -1, *self.shape[1:])[:, :, queries, keys]


WIDTHS = 1024
"""Blocks have a multiple of so many keys: memory of one size is used again, of sizes that grow the heap would."""
PLACES = 72  # bytes for what is visible in a cell of a block, for a pattern in it, and on the way to both


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
        start, min_queries = 0, max(MIN_QUERIES, cells // self.key.shape[2])
        while start < t:
            size = min_queries
            for _ in range(2):  # the second time no block of that size sees more keys than it was made for
                keys = self._keys(slice(start, min(start + size, t)))
                size = max(min_queries, cells // max(1, keys.stop - keys.start))
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


QUERIES = 512  # queries of a block that goes through a fused kernel with a mask of its own, at most
MASK = 16  # bytes for each cell of such a mask: itself, and what the kernel makes of it
TENSORS = 4  # as large as a block of scores that are there with it, itself among them: where there is no kernel


def streaming() -> AbstractContextManager[None]:
    """Within the block `attend` makes no weights; its calls say `weights` only where somebody computes them."""
    return holding(CONTEXTS, streamed_context)


def streamed_context(query: Tensor, key: Tensor, value: Tensor, options: ScoreOptions) -> Tensor:
    """weights · value [b h t k] for query [b h t k], key and value [b g s k], as `attend` defines them."""
    visibility = Visibility.of(options.mask, (len(query), query.shape[2], key.shape[2]), device=query.device)
    plain = options.softcap is None and options.position_bias is None and options.sinks is None
    if plain and value.shape[-1] == query.shape[-1] and query.shape[1]:
        return _fused_context(query, key, value, options.scaling, visibility)
    return _in_blocks(ScoreBlocks.of(query, key, visibility, options), value)


def recomputed_context(call: AttentionCall, *, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context [b h t k] that a call would give with these query [b h t k], key and value [b g s k].

    Computed as calls are computed here: with weights, or without within `streaming`.
    """
    if makes_weights():
        return dense_context(call.module, query, key, value, call.options)[0]
    return streamed_context(query, key, value, call.options)


def _fused_context(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, visibility: Visibility) -> Tensor:
    """By torch's fused attention, which is memory-efficient where it gets no mask, or one for few queries."""
    b, t, s = visibility.shape
    attention = partial(scaled_dot_product_attention, scale=scaling, enable_gqa=key.shape[1] != query.shape[1])
    if visibility.is_full or visibility.is_causal:
        return attention(query, key, value, is_causal=not visibility.is_full)
    parts = []
    for queries in query_blocks(t, b * s * MASK, at_most=QUERIES):
        low, all_low, all_high, high = visibility.bounds(queries)
        keys, mask = slice(low, high), None
        if low < all_low or all_high < high:
            mask = visibility.additive(queries, keys)
            if mask is None:  # queries that see nothing see everything, or they would have no numbers
                visible = visibility.visible(queries, keys)
                mask = visible | ~visible.any(dim=-1, keepdim=True)
        parts.append(attention(query[:, :, queries], key[:, :, keys], value[:, :, keys], attn_mask=mask))
    return torch.cat(parts, dim=2)


def _in_blocks(scores: ScoreBlocks, value: Tensor) -> Tensor:
    """By the formula, block by block; where gradients are wanted each block is computed again in the backward pass."""

    def part(queries: slice) -> Tensor:
        weights, keys = scores.weights(queries)
        return torch.matmul(weights.to(value.dtype), repeat_groups(value[:, :, keys], weights.shape[1]))

    blocks = scores.blocks(TENSORS)
    if torch.is_grad_enabled() and (scores.query.requires_grad or value.requires_grad):
        return torch.cat([checkpoint(part, queries, use_reentrant=False) for queries in blocks], dim=2)
    return torch.cat([part(queries) for queries in blocks], dim=2)
