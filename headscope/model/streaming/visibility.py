"""Which keys each query sees, asked for in blocks of queries; and masks [b 1 t s] that are made in blocks.

A whole mask of 32,000 positions has four GB. What is there for one block at a time keeps within a budget of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headscope.distributed import upload

BUDGET = 128 * 2**20
"""Bytes that streamed attention takes beside the model's own states: for blocks, and for what is kept between them."""
AT_A_TIME = BUDGET // 2
"""Bytes of all tensors of one block."""
LEAST = 1
"""Queries of a block, however much memory one takes."""


def query_blocks(queries: int, bytes_each: int, *, at_most: int | None = None) -> Iterator[slice]:
    """Blocks of queries, each of which takes so many bytes, in their order; `at_most` so many queries in one."""
    step = max(LEAST, AT_A_TIME // max(1, bytes_each))
    step = step if at_most is None else min(step, at_most)
    for start in range(0, queries, step):
        yield slice(start, min(start + step, queries))


CPU = torch.device("cpu")
CELL_SCANNED = 8
"""Bytes for each cell of a mask that is looked at: itself, and the copies of which its ends are found."""


@dataclass(frozen=True)
class Spans:
    """The keys that each query sees, where they lie side by side: from `first` up to, without it, `end` [b t].

    Both are on the CPU, where bounds of blocks are read, wherever the model is.
    """

    first: Tensor
    end: Tensor

    def clip(self, keys: Spans) -> Spans:
        """Only the keys [b 1] of other spans; empty where these end before the first."""
        first = torch.maximum(self.first, keys.first)
        return Spans(first, torch.maximum(first, torch.minimum(self.end, keys.end)))

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """First keys and ends [b t] on a device."""
        if device not in self._copies:
            self._copies[device] = (upload(self.first, device), upload(self.end, device))
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, tuple[Tensor, Tensor]]:
        return {}


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
        """What every query sees as a span of keys; None if some query's keys do not lie side by side."""
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


HIDDEN = -1e30
"""The score of a key that is not visible: far below every other one, and its products with zero are zero."""


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
        """What a model's mask leaves visible; `shape` is b, t, s."""
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
        """Scores [b h q n] with the mask applied: `HIDDEN` for what is not visible."""
        additive = self._additive(queries, keys)
        if additive is not None:
            return (scores + additive).clamp(min=HIDDEN)
        hidden = ~self.visible(queries, keys)
        return scores.masked_fill(hidden, HIDDEN) if scores.requires_grad else scores.masked_fill_(hidden, HIDDEN)

    def kernel_mask(self, queries: slice, keys: slice) -> Tensor:
        """A mask for fused attention; queries that see nothing see everything in it, or they would have no numbers."""
        additive = self._additive(queries, keys)
        if additive is not None:
            return additive
        visible = self.visible(queries, keys)
        return visible | ~visible.any(dim=-1, keepdim=True)

    def _additive(self, queries: slice, keys: slice) -> Tensor | None:
        """The part [b h q n] of an additive mask, which may hold biases too. Returns None if the mask is none."""
        mask = self.mask
        if self.spans is not None or mask is None or isinstance(mask, LazyMask) or mask.dtype == torch.bool:
            return None
        return mask.expand(-1, -1, *self.shape[1:])[:, :, queries, keys]
