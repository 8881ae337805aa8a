"""Which keys each query sees, asked for in blocks of queries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.model.streaming.blocks import query_blocks
from headscope.model.streaming.lazy_mask import LazyMask, Spans, spans_of

CELL = 72
"""Bytes for each cell of a block: of what is visible, of a pattern in it, and of the places of all its cells."""

HIDDEN = -1e30
"""The score of a key that is not visible: far below every other one, and its products with zero are zero."""


@dataclass(frozen=True)
class Visibility:
    """The visible keys of t queries among s keys: `spans` where they lie side by side, else by `mask`.

    `mask` broadcasts to [b h t s]: additive, or boolean with True for visible; None: all is visible, or `spans` says
    what is. `real` [b s] are keys that are no padding, if that says more than the mask does.
    """

    shape: tuple[int, int, int]
    spans: Spans | None = None
    mask: Tensor | None = None
    real: Tensor | None = None

    @classmethod
    def of(cls, mask: Tensor | None, shape: tuple[int, int, int]) -> Visibility:
        """What a model's mask leaves visible; `shape` is b, t, s."""
        if isinstance(mask, LazyMask):
            return cls(shape, mask.spans, None if mask.spans else mask)
        if mask is not None and mask.dtype == torch.bool and mask.shape[1:3] == (1, 1):
            of_keys = spans_of(mask[:, 0, 0])
            if of_keys is not None:
                return cls(shape, Spans(*(end.expand(shape[0], shape[1]) for end in (of_keys.first, of_keys.end))))
        return cls(shape, None, mask)

    def without_padding(self, real: Tensor) -> Visibility:
        """The same without keys that are not `real` [b s]."""
        of_keys = spans_of(real)
        if of_keys is None or (self.spans is None and self.mask is not None):
            return Visibility(self.shape, self.spans, self.mask, real)
        spans = self.spans
        if spans is None:
            spans = Spans(*(torch.full(self.shape[:2], end, device=real.device) for end in (0, real.shape[1])))
        return Visibility(self.shape, spans.clipped(of_keys))

    @cached_property
    def is_causal(self) -> bool:
        """Whether every query sees itself and all keys before it, and nothing else."""
        if self.spans is None or self.real is not None or self.shape[1] != self.shape[2]:
            return False
        ends = torch.arange(1, self.shape[1] + 1, device=self.spans.end.device)
        return bool(((self.spans.first == 0) & (self.spans.end == ends)).all())

    @cached_property
    def is_full(self) -> bool:
        """Whether every query sees every key."""
        if self.real is not None or self.spans is None:
            return self.mask is None and self.real is None
        return bool(((self.spans.first == 0) & (self.spans.end == self.shape[2])).all())

    def bounds(self, queries: slice) -> tuple[int, int, int, int]:
        """Of these queries: the first key that any sees, that all see, the end of those all see, the end of all."""
        s = self.shape[2]
        if self.spans is None:
            return (0, 0, s, s) if self.mask is None and self.real is None else (0, s, 0, s)
        first, end = self.spans.first[:, queries], self.spans.end[:, queries]
        sees = end > first
        if not bool(sees.any()):
            return 0, s, 0, 1
        low, high = int(first.where(sees, s).min()), int(end.max())
        return (low, int(first.max()), int(end.min()), high) if self.real is None else (low, s, 0, high)

    def visible(self, queries: slice, keys: slice | Tensor) -> Tensor:
        """Whether queries see keys (a slice with start and stop, or positions [n]): [b 1 q n] boolean."""
        b, t, s = self.shape
        if self.spans is not None:
            n = torch.arange(keys.start, keys.stop, device=self.spans.end.device) if isinstance(keys, slice) else keys
            first, end = (bound[:, None, queries, None] for bound in (self.spans.first, self.spans.end))
            visible = (n >= first) & (n < end)
        elif isinstance(self.mask, LazyMask):
            visible = self.mask.block(queries, keys if isinstance(keys, slice) else slice(0, s))
            visible = visible if isinstance(keys, slice) else visible[..., keys]
        elif self.mask is None:
            rows = queries.stop - queries.start
            columns = keys.stop - keys.start if isinstance(keys, slice) else len(keys)
            device = None if self.real is None else self.real.device
            visible = torch.ones(b, 1, rows, columns, dtype=torch.bool, device=device)
        else:
            part = self.mask.expand(-1, -1, t, s)[:, :1, queries][..., keys]
            visible = part if part.dtype == torch.bool else part > torch.finfo(part.dtype).min / 2
        return visible if self.real is None else visible & self.real[:, None, None, keys]

    def hide(self, scores: Tensor, queries: slice, keys: slice | Tensor) -> Tensor:
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

    def _additive(self, queries: slice, keys: slice | Tensor) -> Tensor | None:
        """The part [b h q n] of an additive mask, which may hold biases too; None where the mask is none."""
        mask = self.mask
        if self.spans is not None or mask is None or isinstance(mask, LazyMask) or mask.dtype == torch.bool:
            return None
        return mask.expand(-1, -1, *self.shape[1:])[:, :, queries][..., keys]

    def seen(self, columns: Tensor) -> Tensor:
        """Sum over the keys that each query sees of columns [b s n]: [b t n]."""
        if self.spans is not None and self.real is None:
            sums = torch.nn.functional.pad(columns.double().cumsum(dim=1), (0, 0, 1, 0))  # [b s+1 n]
            sentences, _, n = columns.shape
            first, end = (bound[..., None].expand(sentences, -1, n) for bound in (self.spans.first, self.spans.end))
            return (sums.gather(1, end) - sums.gather(1, first)).to(columns.dtype)
        parts = [visible[:, 0].expand(len(columns), -1, -1).to(columns.dtype) @ columns for _, visible in self.blocks()]
        return torch.cat(parts, dim=1)

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of queries with what they see [b 1 q s]."""
        b, t, s = self.shape
        for queries in query_blocks(t, b * s * CELL):
            yield queries, self.visible(queries, slice(0, s))
