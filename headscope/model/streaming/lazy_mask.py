"""A mask [b 1 t s] that is known by its function and made in blocks; a whole one of 32,000 positions has four GB."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from headscope.model.streaming.blocks import query_blocks

CELL = 8
"""Bytes for each cell of a mask that is looked at: itself, and the copies of which its ends are found."""


@dataclass(frozen=True)
class Spans:
    """The keys that each query sees, where they lie side by side: from `first` up to, without it, `end` [b t]."""

    first: Tensor
    end: Tensor

    @classmethod
    def between(cls, first: Tensor, end: Tensor) -> Spans:
        """Spans that are empty where `end` lies before `first`."""
        return cls(first, torch.maximum(first, end))

    def clipped(self, keys: Spans) -> Spans:
        """Only the keys [b 1] of other spans."""
        return Spans.between(torch.maximum(self.first, keys.first), torch.minimum(self.end, keys.end))


class LazyMask(Tensor):
    """An additive mask of the shape [b 1 t s] that has no memory: `block` makes parts of it, True for visible.

    Any operation of torch on it makes the whole mask first, so a model that computes with its mask gets what it expects
    (and needs the memory for it).
    """

    block: Callable[[slice, slice], Tensor]
    """Of queries and keys, as slices with a start and a stop: [b 1 q s] boolean."""
    known: Spans | None

    @staticmethod
    def __new__(
        cls,
        block: Callable[[slice, slice], Tensor],
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        known: Spans | None = None,
    ) -> LazyMask:
        mask = Tensor._make_wrapper_subclass(cls, tuple(shape), dtype=dtype, device=device)
        mask.block, mask.known = block, known
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
        """What every query sees as a span of keys; None where some query's keys do not lie side by side."""
        if self.known is not None:
            return self.known
        b, _, t, s = self.shape
        parts = [_spans(self.block(queries, slice(0, s))[:, 0]) for queries in query_blocks(t, b * s * CELL)]
        if any(part is None for part in parts):
            return None
        return Spans(*(torch.cat([getattr(part, end) for part in parts], dim=1) for end in ("first", "end")))


def causal_mask(positions: int, real: Tensor | None, *, device: torch.device) -> LazyMask:
    """The mask of causal self attention without the keys that are not `real` [b s]."""
    b = 1 if real is None else len(real)

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = (torch.arange(part.start, part.stop, device=device) for part in (queries, keys))
        visible = (columns <= rows[:, None]).expand(b, 1, -1, -1)
        return visible if real is None else visible & real.bool()[:, None, None, keys]

    whole = Spans(*(torch.tensor([[end]], device=device) for end in (0, positions)))
    of_keys = whole if real is None else spans_of(real)
    ends = torch.arange(1, positions + 1, device=device).expand(b, -1)
    known = None if of_keys is None else Spans(torch.zeros_like(ends), ends).clipped(of_keys)
    return LazyMask(block, (b, 1, positions, positions), dtype=torch.float32, device=device, known=known)


def spans_of(real: Tensor) -> Spans | None:
    """The real keys [b s] of every sentence as one span [b 1]; None where padding lies between them."""
    return _spans(real.bool()[:, None])


def _spans(visible: Tensor) -> Spans | None:
    """Spans of visible [b t s]; None where there are gaps."""
    s = visible.shape[-1]
    count = visible.sum(dim=-1)
    first = visible.to(torch.uint8).argmax(dim=-1)
    last = s - 1 - visible.flip(-1).to(torch.uint8).argmax(dim=-1)
    if ((count > 0) & (last - first + 1 != count)).any():
        return None
    return Spans(first, first + count)


def _whole(value: Any) -> Any:
    if not isinstance(value, LazyMask):
        return value
    visible = value.block(*(slice(0, size) for size in value.shape[-2:]))
    zero = torch.zeros((), dtype=value.dtype, device=value.device)
    return torch.where(visible, zero, torch.finfo(value.dtype).min)
