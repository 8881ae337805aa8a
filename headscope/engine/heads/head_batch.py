"""The heads of one site and layer at work on one batch: what an analysis observes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch, Side
from headscope.engine.heads.rows import Match, Rows
from headscope.engine.heads.shared import SharedTensors
from headscope.engine.heads.streamed_rows import StreamedRows
from headscope.heads import Site


@dataclass
class HeadBatch:
    """One site and layer at work on one batch, with what analyses share computed once.

    `rows` answers for the weights [b h t s]: their statistics always, and `weights` itself where all of them are there
    (they are not in a long text, see `headscope.engine.base.Analysis.reads`). context [b h t k] (before mixing and
    gates), in float32 at least, whatever the model computes in; value [b g s k] as the model has it, one for each of g
    groups of heads. `queries` [b t] and `keys` [b s] say which positions count: real tokens, without special ones
    unless they are kept; where no key counts, no query does. Of a block of queries, t are those from position
    `first_query` on. Analyses that need gradients find that of the objective with respect to the context in `gradient`
    [b h t k], row i that of sentence i's value, and its counts in `counts` [b].
    """

    site: Site
    layer: int
    rows: Rows
    context: Tensor
    queries: Tensor
    keys: Tensor
    query_side: Side
    key_side: Side
    batch: Batch
    of_batch: SharedTensors = field(default_factory=SharedTensors)
    of_rows: SharedTensors = field(default_factory=SharedTensors)
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    first_query: int = 0

    @property
    def weights(self) -> Tensor:
        """The weights [b h t s], in float32 at least."""
        return self.rows.weights

    @property
    def visible(self) -> Tensor:
        """Where a query may look [b t s], special tokens included, padding excluded."""
        return self.rows.visible

    @property
    def max_weight(self) -> Tensor:
        """Largest weight of each query on the counted keys that it sees [b h t]."""
        return self.rows.maximum[0]

    @property
    def argmax_position(self) -> Tensor:
        """Position of that key [b h t]; the first one where several tie (see `max_and_position`)."""
        return self.rows.maximum[1]

    @property
    def entropy(self) -> Tensor:
        """−Σ_s w ln w of each query's weights on all keys, in nats [b h t]."""
        return self.rows.entropy

    def weight_on(self, columns: Tensor) -> Tensor:
        """Σ_s weights · columns [b h t n] for columns [b s n], such as the indicators of sets of keys."""
        return self.rows.weight_on(columns)

    def visible_on(self, columns: Tensor) -> Tensor:
        """Σ of columns [b s n] over the keys that each query sees [b t n]."""
        return self.rows.visible_on(columns)

    def weight_on_pairs(self, name: str | None, match: Match, *, every_key: bool = False) -> tuple[Tensor, Tensor]:
        """Σ of the weights [b h t] on matching keys that are counted and seen, and whether there are any [b t].

        `match` says which keys [b q s] are meant for the queries of a slice; `name` is that of a pattern that
        is the same for all layers, None of one that is this layer's alone. With `every_key` keys need not be counted.
        """
        return self.rows.weight_on_pairs(name, match, every_key=every_key)

    @property
    def positions(self) -> Tensor:
        """Positions [t] of the queries in their sentences."""
        return torch.arange(self.first_query, self.first_query + self.queries.shape[1], device=self.queries.device)

    def shared(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that depends on batch, site and visibility but not on the layer: made once for all of these.

        Self attention and cross attention see different sides, and layers with and without a sliding
        window see differently far, so the site and what is visible are part of the key. Of a block of queries nothing
        is kept when the block is through.
        """
        return self.of_rows.get(f"{self.site}/{name}", self.rows.sight, make)

    def once(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that depends on batch and site alone, not on the layer, nor on which queries are looked at."""
        return self.of_batch.get(f"{self.site}/{name}", self.batch, make)

    def over_queries(self, values: Tensor, *, only: Tensor | None = None) -> Ratio:
        """Mean over counted queries of values [b h t] (and over those of `only` [b t])."""
        if only is None:
            weights = self.shared(f"counted/{values.dtype}", lambda: self.queries.to(values.dtype))
        else:
            weights = (self.queries & only).to(values.dtype)  # [b t]
        total = (values @ weights[:, :, None])[..., 0]  # [b h t] · [b t 1]
        return Ratio(total, weights.sum(dim=-1, keepdim=True))

    def in_blocks(self) -> Iterator[HeadBatch]:
        """The same heads in blocks of queries whose weights are all there: itself, where they are anyhow."""
        if not isinstance(self.rows, StreamedRows):
            yield self
            return
        for queries, rows in self.rows.blocks():
            yield replace(
                self,
                rows=rows,
                context=self.context[:, :, queries],
                queries=self.queries[:, queries],
                of_rows=SharedTensors(),
                first_query=queries.start,
            )
