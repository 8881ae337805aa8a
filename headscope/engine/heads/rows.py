"""Rows of attention weights, as analyses ask for them; here all of them made, as one tensor.

`headscope.engine.heads.streamed_rows` answers the same questions without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from headscope.distributed import upload

T = TypeVar("T")


@dataclass
class SharedTensors:
    """What is shared while one batch is on its way."""

    entries: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, owner: object, make: Callable[[], T]) -> T:
        """What `make` made when it was first asked for under this name with this very owner."""
        key = f"{name}/{id(owner)}"
        if key not in self.entries:
            self.entries[key] = (make(), owner)  # holding the owner keeps its id from being used again
        value: T = self.entries[key][0]
        return value


Match = Callable[[slice], Tensor]
"""Which keys are meant for these queries (positions from start to stop): [b q s] boolean."""


class AttentionRows(Protocol):
    """What can be asked of the weights [b h t s] of one site and layer."""

    @property
    def weights(self) -> Tensor:
        """All of them [b h t s], in float32 at least; HeadscopeError where they are streamed."""
        ...

    @property
    def visible(self) -> Tensor:
        """Where queries may look [b t s]; HeadscopeError where weights are streamed."""
        ...

    def seen_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Blocks of queries, by their positions, with one for each counted key that a query sees [b q s], else zero.

        Where all weights are there, it is one block.
        """
        ...

    @property
    def sight(self) -> object:
        """An object that is the same for all layers whose queries see the same keys."""
        ...

    @property
    def maximum(self) -> tuple[Tensor, Tensor]:
        """The largest weight [b h t] on counted keys that the query sees, and its position (see `max_and_position`)."""
        ...

    @property
    def entropy(self) -> Tensor:
        """−Σ_s w ln w in nats [b h t]."""
        ...

    def weight_on(self, columns: Tensor) -> Tensor:
        """Σ_s weights · columns [b h t n] for columns [b s n], such as the indicators of sets of keys."""
        ...

    def visible_on(self, columns: Tensor) -> Tensor:
        """Σ of columns [b s n] over the keys that each query sees [b t n]."""
        ...

    def weight_on_pairs(self, name: str | None, match: Match, *, every_key: bool = False) -> tuple[Tensor, Tensor]:
        """Σ of the weights [b h t] on matching keys that are counted and seen, and whether there are any [b t].

        `name` says what `match` matches, which is the same for all layers of a batch; None: it is this layer's alone.
        With `every_key` keys need not be counted.
        """
        ...


@dataclass
class DenseRows:
    """All weights [b h t s] of queries from position `first_query` on; `visible` [b t s], counted `keys` [b s]."""

    weights: Tensor
    visible: Tensor
    keys: Tensor
    shared: SharedTensors
    first_query: int = 0

    def seen_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """See `AttentionRows`."""
        yield slice(self.first_query, self.first_query + self.weights.shape[2]), self._seen()

    @property
    def sight(self) -> object:
        """See `AttentionRows`."""
        return self.visible

    @cached_property
    def maximum(self) -> tuple[Tensor, Tensor]:
        """See `AttentionRows`."""
        hidden = self._shared("hidden", lambda: self._seen()[:, None] - 1)  # [b 1 t s]: zero, or minus one if hidden
        return max_and_position(self.weights.add(hidden, alpha=2))  # no weight is above one: hidden ones are below all

    def _seen(self) -> Tensor:
        return self._shared("seen", lambda: self._visible(self.weights.dtype) * self.keys[:, None])

    @property
    def entropy(self) -> Tensor:
        """See `AttentionRows`."""
        if self.weights.device.type != "cpu":
            terms: Tensor = torch.special.entr(self.weights)  # fewer kernels, where each has a price
            return terms.sum(dim=-1)
        logs = self.weights.clamp(min=torch.finfo(self.weights.dtype).tiny).log_()  # 0 ln 0 is 0
        return -torch.einsum("bhts,bhts->bht", self.weights, logs)

    def weight_on(self, columns: Tensor) -> Tensor:
        """See `AttentionRows`."""
        columns = placed(self.shared, columns, self.weights)
        sums = self.weights.flatten(1, 2) @ columns  # [b h·t n]
        return sums.view(*self.weights.shape[:-1], -1)

    def visible_on(self, columns: Tensor) -> Tensor:
        """See `AttentionRows`."""
        return self._visible(columns.dtype) @ upload(columns, self.visible.device)

    def _visible(self, dtype: torch.dtype) -> Tensor:
        return self._shared(f"visible/{dtype}", lambda: self.visible.to(dtype))

    def weight_on_pairs(self, name: str | None, match: Match, *, every_key: bool = False) -> tuple[Tensor, Tensor]:
        """See `AttentionRows`."""
        queries = slice(self.first_query, self.first_query + self.weights.shape[2])
        keys = self.keys | every_key

        def make() -> Tensor:
            return match(queries) & self.visible & keys[:, None]

        matches = make() if name is None else self._shared(f"pairs/{name}", make)
        score = torch.einsum("bhts,bts->bht", self.weights, matches.to(self.weights.dtype))
        return score, matches.any(dim=-1)

    def _shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        return self.shared.get(name, self.visible, make)


def placed(shared: SharedTensors, columns: Tensor, weights: Tensor) -> Tensor:
    """Columns where weights are, in numbers like them."""
    if columns.device == weights.device and columns.dtype is weights.dtype:
        return columns
    return shared.get(f"columns/{weights.dtype}", columns, lambda: upload(columns.to(weights.dtype), weights.device))


# Weights nearer than this share of the larger one are equal. In float32 not more than two units in the last
# place: of the million rows of a real BERT on 1,000 sentences none has its two largest weights within 1e-6,
# but word-level sums come as near as 4e-7, and those are different numbers.
TIE = {torch.float32: 2.5e-7, torch.float64: 1e-12}


def max_and_position(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value along the last axis, and its first place.

    Values that differ by rounding only (see `TIE`) count as tied.
    A model may give two keys the same weight, as T5 does for one token twice in one bucket of distance:
    their last digits change with the shape of the batch, and the place must not.
    """
    if values.device.type != "cpu":
        max_weight = values.amax(dim=-1)
        least = torch.minimum(max_weight, max_weight * (1 - TIE[values.dtype]))
        return max_weight, (values >= least[..., None]).to(torch.uint8).argmax(dim=-1)
    by_key = values.movedim(-1, 0).contiguous()  # [s …]: many short rows side by side, which is much faster
    max_weight, s = by_key.amax(dim=0), len(by_key)
    near = by_key >= torch.minimum(max_weight, max_weight * (1 - TIE[values.dtype]))
    from_end = torch.arange(s, 0, -1, device=values.device, dtype=torch.uint8 if s < 256 else torch.int32)
    first = s - (near * from_end.view(-1, *[1] * max_weight.ndim)).amax(dim=0).long()  # half the time of argmax
    return max_weight, first.clamp(max=s - 1)
