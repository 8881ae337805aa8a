"""The heads of one site and layer at work on one batch: what an analysis observes, made of a call of `attend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch, Side
from headscope.distributed import upload
from headscope.engine.heads.rows import AttentionRows, DenseRows, Match, SharedTensors, T
from headscope.engine.heads.streamed_rows import StreamedRows
from headscope.errors import CheckpointError
from headscope.heads import Site
from headscope.model.attention import AttentionCall, precise
from headscope.model.discovery import AttentionSite
from headscope.model.streaming.statistics import ScoreBlocks
from headscope.model.streaming.visibility import Visibility


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
        return self.batch.on_host.sides(self.site)

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
    def visible_keys(self) -> Tensor:
        """How many counted keys each query sees [b t], where the model is."""
        return self.shared(
            "visible keys", lambda: self.visible_on(self.host_keys[..., None].to(self.context.dtype))[..., 0]
        )

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


@dataclass
class ObservedBatch:
    """A batch on its way through the model; which tokens count as queries and keys is said as in `Side.counted`."""

    batch: Batch
    keep_special: bool = False
    exclude_sinks: bool = False
    shared: SharedTensors = field(default_factory=SharedTensors)

    def heads(self, attention_site: AttentionSite, call: AttentionCall) -> HeadBatch:
        """The heads of one call; CheckpointError where its positions are not those of the text."""
        batch = self._batch_on(call.context.device)
        query_side, key_side = batch.sides(attention_site.site)
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        size = (call.query.shape[2], call.key.shape[2])
        if size != expected:
            raise CheckpointError(
                f"{attention_site.site}.{attention_site.layer} attends from {size[0]} to "
                f"{size[1]} positions where the text has {expected[0]} and {expected[1]}; "
                "it cannot be analysed token by token"
            )
        host_queries, host_keys, queries, keys = self._counted(batch, attention_site.site)
        return HeadBatch(
            site=attention_site.site,
            layer=attention_site.layer,
            rows=self._rows(call, attention_site.site, keys),
            context=precise(call.context.detach()),
            value=call.value.detach(),
            queries=queries,
            keys=keys,
            query_side=query_side,
            key_side=key_side,
            batch=batch,
            of_batch=self.shared,
            of_rows=self.shared,
            host_queries=host_queries,
            host_keys=host_keys,
        )

    def joined(self, attention_sites: Sequence[AttentionSite], calls: Sequence[AttentionCall]) -> HeadBatch:
        """The heads of calls of one site that see the same keys, side by side."""
        first = self.heads(attention_sites[0], calls[0])
        if len(calls) == 1:
            return first
        assert isinstance(first.rows, DenseRows)
        weights = torch.cat([call.weights.detach() for call in calls], dim=1)
        contexts = torch.cat([call.context.detach().transpose(1, 2) for call in calls], dim=2)  # as they lie in memory
        return replace(
            first,
            rows=replace(first.rows, weights=precise(weights)),
            context=precise(contexts).transpose(1, 2),
            value=torch.empty(0),
            layers=tuple(attention_site.layer for attention_site in attention_sites),
        )

    def sees(self, attention_site: AttentionSite, call: AttentionCall) -> tuple[object, ...]:
        """What is the same for calls that can be joined."""
        return attention_site.site, call.query.shape, call.key.shape[2], id(call.mask), call.context.device

    def _batch_on(self, device: torch.device) -> Batch:
        """The batch where a layer is, which is not where others are if the model is spread over several devices."""
        if device == self.batch.source.ids.device:
            return self.batch
        return self.shared.get(f"batch/{device}", self.batch, lambda: self.batch.to(device))

    def _counted(self, batch: Batch, site: Site) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which queries [b t] and keys [b s] count, on the CPU and on the device: the same for all layers of a site."""

        def make() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            which = {"keep_special": self.keep_special, "exclude_sinks": self.exclude_sinks}
            counted = [side.counted(**which) for side in host.sides(site)]
            queries, keys = counted[0] & counted[1].any(dim=-1, keepdim=True), counted[1]
            return queries, keys, upload(queries, device), upload(keys, device)

        host, device = batch.on_host, batch.source.ids.device
        return self.shared.get(f"counted/{site}", batch, make)

    def _rows(self, call: AttentionCall, site: Site, keys: Tensor) -> AttentionRows:
        t, device = call.query.shape[2], call.context.device
        key_side = self._batch_on(device).sides(site)[1]
        name = f"{id(key_side)}/{t}"
        if call.made_weights is not None:
            visible = self.shared.get(f"visible/{name}", call.mask, lambda: _visible(call, key_side))
            return DenseRows(precise(call.made_weights.detach()), visible, keys, self.shared)
        size, real = (len(call.query), t, call.key.shape[2]), self.batch.on_host.sides(site)[1].real
        visibility = self.shared.get(
            f"visibility/{name}", call.mask, lambda: Visibility.of(call.mask, size, device=device)
        )
        seen = self.shared.get(f"seen/{name}", visibility, lambda: visibility.without_padding(real))
        options = call.options
        scores = ScoreBlocks.of(
            call.query.detach(),
            call.key.detach(),
            visibility,
            scaling=options.scaling,
            softcap=options.softcap,
            position_bias=None if options.position_bias is None else options.position_bias.detach(),
            sinks=None if options.sinks is None else options.sinks.detach(),
        )
        return StreamedRows(scores, seen, keys, self.shared)


def _visible(call: AttentionCall, key_side: Side) -> Tensor:
    """Where each query may look [b t s]: what the model's mask leaves, without padding."""
    real = key_side.real[:, None, :].expand(-1, call.query.shape[2], -1)
    if call.mask is None:
        return real
    if call.mask.dtype == torch.bool:
        return call.mask[:, 0] & real
    return (call.mask[:, 0] > torch.finfo(call.mask.dtype).min / 2) & real
