"""The heads of one site and layer at work on one batch: what an analysis observes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch, Side
from headscope.distributed import upload
from headscope.engine.heads.rows import AttentionRows, Match
from headscope.engine.heads.shared import SharedTensors, T
from headscope.engine.heads.streamed_rows import StreamedRows
from headscope.heads import Site


def sides(batch: Batch, site: Site) -> tuple[Side, Side]:
    """What queries and keys of a site are."""
    text = batch.source if batch.target is None else batch.target
    return batch.source if site is Site.ENCODER_SELF else text, text if site is Site.DECODER_SELF else batch.source


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

    Analyses that join layers (`headscope.engine.base.Analysis.joins_layers`) may see several `layers` at once: h are
    then the heads of the first layer, those of the second, and so on, each layer with as many. `host_queries` and
    `host_keys` are `queries` and `keys` on the CPU: what follows from text alone costs a device nothing there.
    """

    site: Site
    layer: int
    rows: AttentionRows
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
    layers: tuple[int, ...] = ()
    host_queries: Tensor = field(default_factory=lambda: torch.empty(0))
    host_keys: Tensor = field(default_factory=lambda: torch.empty(0))

    def __post_init__(self) -> None:
        self.layers = self.layers or (self.layer,)
        self.host_queries = self.host_queries if self.host_queries.numel() else self.queries
        self.host_keys = self.host_keys if self.host_keys.numel() else self.keys

    @property
    def host_sides(self) -> tuple[Side, Side]:
        """What queries and keys are, on the CPU."""
        return sides(self.batch.on_host, self.site)

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
        """Σ_s weights · columns [b h t n] for columns [b s n], such as the indicators of sets of keys.

        Columns that are the same for all layers (`once`) may be on the CPU: which keys they name is then known there.
        """
        return self.rows.weight_on(columns)

    def visible_on(self, columns: Tensor) -> Tensor:
        """Σ of columns [b s n] over the keys that each query sees [b t n], where the model is."""
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
        last = self.first_query + self.queries.shape[1]

        def make() -> Tensor:
            return upload(torch.arange(self.first_query, last), self.queries.device)

        return self.of_rows.get(f"positions/{self.first_query}", self.queries, make)

    @cached_property
    def offsets(self) -> Tensor:
        """Positions of the largest weights less those of their queries [b h t]."""
        return self.argmax_position - self.positions

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """A tensor that depends on batch, site and visibility but not on the layer: made once for all of these.

        Self attention and cross attention see different sides, and layers with and without a sliding
        window see differently far, so the site and what is visible are part of the key. Of a block of queries nothing
        is kept when the block is through.
        """
        return self.of_rows.get(f"{self.site}/{name}", self.rows.sight, make)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """A tensor that depends on batch and site alone, not on the layer, nor on which queries are looked at."""
        return self.of_batch.get(f"{self.site}/{name}", self.batch, make)

    def over_queries(self, values: Tensor, *, only: Tensor | None = None) -> Ratio:
        """Mean over counted queries of values [b h t] (and over those of `only` [b t], which may be on the CPU)."""
        weights, count = self.counted(values.dtype, only)
        return Ratio((values @ weights[:, :, None])[..., 0], count)  # [b h t] · [b t 1]

    def counted(self, dtype: torch.dtype, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Which queries count (of those of `only`) as numbers [b t], and how many [b 1], on the CPU if that knows."""

        def make() -> tuple[Tensor, Tensor]:
            queries = self.host_queries if only is None or only.device.type == "cpu" else self.queries
            weights = (queries if only is None else queries & only).to(dtype)
            return upload(weights, self.queries.device), weights.sum(dim=-1, keepdim=True)

        return self.of_rows.get(f"counted/{dtype}/{id(self.queries)}", self.queries if only is None else only, make)

    @property
    def counted_places(self) -> tuple[Tensor, Tensor]:
        """Every counted query, sentence by sentence: its sentence [n] and its place [n] among b·t positions."""

        def make() -> tuple[Tensor, Tensor]:
            sentence, position = self.host_queries.nonzero(as_tuple=True)
            places = torch.stack([sentence, sentence * self.host_queries.shape[1] + position])
            row, place = upload(places, self.queries.device)
            return row, place

        return self.of_rows.get("places", self.queries, make)

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
                host_queries=self.host_queries[:, queries],
                of_rows=SharedTensors(),
                first_query=queries.start,
            )
