"""The heads of one (site, layer) on one batch, as an analysis observes them: made from one call of `attend`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch, CountedTokens, Side
from headscope.distributed import upload
from headscope.errors import CheckpointError, HeadscopeError, flag
from headscope.heads import Site
from headscope.model.attention import AttentionCall, precise
from headscope.model.discovery import AttentionSite
from headscope.model.streaming import ScoreBlocks, Visibility

T = TypeVar("T")


@dataclass
class SharedTensors:
    """A cache of tensors that analyses share during one batch."""

    entries: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, owner: object, make: Callable[[], T]) -> T:
        """The result of `make`, which is called only once for this name and this very object `owner`."""
        key = f"{name}/{id(owner)}"
        if key not in self.entries:
            self.entries[key] = (make(), owner)  # keeping the owner keeps its id from being reused
        return self.entries[key][0]


# Weights nearer than this share of the larger one are equal. In float32 not more than two units in the last
# place: of the million rows of a real BERT on 1,000 sentences none has its two largest weights within 1e-6,
# but word-level sums come as near as 4e-7, and those are different numbers.
TIE = {torch.float32: 2.5e-7, torch.float64: 1e-12}
SHORT = 128
"""Length of the parts that a row is cut into on a CPU, which reduces them much faster than a whole row."""


def max_and_position(values: Tensor) -> tuple[Tensor, Tensor]:
    """The largest value along the last axis, and its first position.

    Values that differ by rounding only (see `TIE`) count as tied. A model may give two keys the same weight, as T5
    does for one token twice in one bucket of distance: their last digits change with the shape of the batch, the
    position must not.
    """
    s = values.shape[-1]
    if values.device.type != "cpu":
        max_weight = values.amax(dim=-1)
        return max_weight, _first_at_least(values, _tied(max_weight))
    if s >= SHORT:  # first the largest value of each part, then the position within that part
        padded = torch.nn.functional.pad(values, (0, -s % SHORT), value=-torch.inf) if s % SHORT else values
        parts = padded.unflatten(-1, (-1, SHORT))
        by_part = parts.amax(dim=-1)
        max_weight = by_part.amax(dim=-1)
        part = _first_at_least(by_part, _tied(max_weight))
        inside = parts.gather(-2, part[..., None, None].expand(*part.shape, 1, SHORT))[..., 0, :]
        return max_weight, part * SHORT + _first_at_least(inside, _tied(max_weight))
    by_key = values.movedim(-1, 0).contiguous()  # [s …]
    max_weight = by_key.amax(dim=0)
    near = by_key >= _tied(max_weight)
    from_end = torch.arange(s, 0, -1, dtype=torch.uint8)
    first = s - (near * from_end.view(-1, *[1] * max_weight.ndim)).amax(dim=0).long()  # half the time of argmax
    return max_weight, first.clamp(max=s - 1)


def _tied(max_weight: Tensor) -> Tensor:
    """The least value that ties with the largest."""
    return torch.minimum(max_weight, max_weight * (1 - TIE[max_weight.dtype]))


def _first_at_least(values: Tensor, threshold: Tensor) -> Tensor:
    return (values >= threshold[..., None]).view(torch.uint8).argmax(dim=-1)


TENSORS = 10
"""Tensors of the size of a block of weights that exist at once while analyses work on the block."""


class Rows(NamedTuple):
    """Weights [b h t n] of queries on n keys, which of them each query may see [b t n], and the slice of these keys."""

    weights: Tensor
    visible: Tensor
    keys: slice


class Maximum(NamedTuple):
    """The largest weight of each query, and the position of its key, both [b h t]."""

    weight: Tensor
    position: Tensor


@dataclass
class HeadBatch:
    """The heads of one (site, layer) on one batch, or on a block of its queries; shared quantities are computed once.

    `weights` [b h t s] has the rows of all queries, or in a long text those of a block of t queries from position
    `first_query` on (`in_blocks`; see `headscope.engine.base.Analysis.reads`). `context` [b h t k], before mixing and
    gates, is in float32 at least; `value` [b g s k] is as the model has it, one for each of g groups of heads.
    `queries` [b t] and `keys` [b s] mark the positions that count: real tokens, without special ones unless they are
    kept. Without a counted key no query of a sentence counts. For analyses that need gradients `gradient` [b h t k] is
    that of the objective with respect to the context, row i for sentence i's value, and `counts` [b] the objective's
    counts.
    """

    site: Site
    layer: int
    context: Tensor
    queries: Tensor
    keys: Tensor
    query_side: Side
    key_side: Side
    batch: Batch
    mask_id: object
    """One object for all layers whose queries see the same keys."""
    rows: Rows | None = None
    scores: ScoreBlocks | None = None
    """Makes the rows block by block where attention is streamed; None where `rows` are there."""
    of_batch: SharedTensors = field(default_factory=SharedTensors)
    value: Tensor = field(default_factory=lambda: torch.empty(0))
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))
    counts: Tensor = field(default_factory=lambda: torch.empty(0))
    first_query: int = 0
    host_queries: Tensor = field(default_factory=lambda: torch.empty(0))
    """`queries` on the CPU."""

    @property
    def _rows(self) -> Rows:
        if self.rows is None:
            raise HeadscopeError(
                f"an analysis asks for weights of {self.context.shape[2]} × {self.keys.shape[1]} positions, which are "
                f'streamed; it has to declare reads = "matrix" or "rows", or takes {flag.attention} dense'
            )
        return self.rows

    @property
    def weights(self) -> Tensor:
        """The weights [b h t s], in float32 at least."""
        return self.on_all_keys(self._rows.weights)

    def on_all_keys(self, values: Tensor) -> Tensor:
        """Values [… n] on the keys of `rows` as values on all keys [… s], zero on the others."""
        keys, size = self._rows.keys, self.keys.shape[1]
        missing = (keys.start, size - keys.stop)
        return torch.nn.functional.pad(values, missing) if any(missing) else values

    @property
    def visible(self) -> Tensor:
        """The keys that a query may see [b t s]: special tokens included, padding excluded."""
        return self.on_all_keys(self._rows.visible)

    @cached_property
    def maximum(self) -> Maximum:
        """The largest weight of each query on the counted keys that it sees.

        The first one where several tie (see `max_and_position`).
        """
        weights, _, keys = self._rows
        # [b 1 t n]: zero, or minus one if hidden
        hidden = self._of_rows("hidden", lambda: self._visible_keys[:, None].to(weights.dtype) - 1)
        largest, position = max_and_position(weights.add(hidden, alpha=2))  # no weight is above one
        return Maximum(largest, position + keys.start)

    @cached_property
    def _visible_keys(self) -> Tensor:
        """A mask [b t n] of the keys of `rows` that are counted and visible to each query."""
        _, visible, keys = self._rows
        return self._of_rows("seen", lambda: visible & self.keys[:, None, keys])

    @cached_property
    def log_weights(self) -> Tensor:
        """w ln w of the weights w [b h t n] on the keys of `rows`."""
        weights = self._rows.weights
        if weights.device.type != "cpu":
            return torch.xlogy(weights, weights)
        # a fifth of the time of `xlogy`; 0 ln 0 is 0
        return weights.clamp(min=torch.finfo(weights.dtype).tiny).log_().mul_(weights)

    @property
    def entropy(self) -> Tensor:
        """−Σ_s w ln w of each query's weights on all keys, in nats [b h t]."""
        return -self.log_weights.sum(dim=-1)

    @property
    def visible_keys(self) -> Tensor:
        """The number of counted keys visible to each query [b t]."""
        return self.shared("visible keys", lambda: self.visible_on(self.keys[..., None].to(self.context.dtype))[..., 0])

    def weight_on(self, columns: Tensor) -> Tensor:
        """Σ_s weights · columns [b h t n] for columns [b s n], such as indicators of n sets of keys."""
        weights, _, keys = self._rows
        sums = weights.flatten(1, 2) @ columns[:, keys].to(weights.dtype)  # [b h·t n]
        return sums.view(*weights.shape[:-1], -1)

    def visible_on(self, columns: Tensor) -> Tensor:
        """Σ of columns [b s n] over the keys that each query sees [b t n]."""
        _, visible, keys = self._rows
        return self._of_rows(f"visible/{columns.dtype}", lambda: visible.to(columns.dtype)) @ columns[:, keys]

    def evenly_on(self, columns: Tensor, keys: Tensor | None = None) -> Tensor:
        """The weight on columns [b s n] of a query that attends evenly to the `keys` [b s] that it sees: [b n t]."""
        of_all = torch.ones_like(columns[..., :1]) if keys is None else keys[..., None].to(columns.dtype)
        visible = self.visible_on(torch.cat([columns, of_all], dim=-1))  # [b t n+1]
        return (visible[..., :-1] / visible[..., -1:].clamp(min=1)).transpose(1, 2)

    def weight_on_pairs(
        self, name: str | None, match: Callable[[slice], Tensor], *, every_key: bool = False, earlier: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The weight of each query on matching keys that it sees [b h t], and whether there are any [b t].

        `match` marks the matching ones among the n keys of a slice [b t n]. `name` names a pattern that is the same for
        all layers; None: it is this layer's alone. With `every_key` keys that are not counted match too, with `earlier`
        only those before the query.
        """
        weights, visible, keys = self._rows

        def make() -> Tensor:
            seen_keys = visible if every_key else self._visible_keys
            if earlier:
                seen_keys = self._of_rows("before", lambda: seen_keys.tril(self.first_query - keys.start - 1))
            return match(keys) & seen_keys

        pairs = make() if name is None else self._of_rows(f"pairs/{name}", make)
        on_pairs = torch.einsum("bhts,bts->bht", weights, pairs.to(weights.dtype))
        any_key = pairs.any(dim=-1) if name is None else self.shared(f"any/{name}", lambda: pairs.any(dim=-1))
        return on_pairs, any_key

    @property
    def span(self) -> slice:
        """The positions of the queries in their sentences."""
        return slice(self.first_query, self.first_query + self.queries.shape[1])

    @property
    def positions(self) -> Tensor:
        """Positions [t] of the queries in their sentences."""
        return self.shared("positions", lambda: torch.arange(self.span.start, self.span.stop, device=self.keys.device))

    def _of_rows(self, name: str, make: Callable[[], Tensor]) -> Tensor:
        """A tensor as large as the rows: made once for all layers, unless attention is read in blocks of queries."""
        return self.shared(name, make) if self.queries.shape == self.query_side.ids.shape else make()

    def shared(self, name: str, make: Callable[[], T]) -> T:
        """A tensor that depends on batch, site and visible keys but not on the layer: made once for all layers.

        The site and the visible keys are part of the cache key: layers with a sliding window see fewer keys.
        """
        return self.of_batch.get(f"{self.site}/{name}/{self.span}", self.mask_id, make)

    def cached_per_batch(self, name: str, make: Callable[[], T]) -> T:
        """A tensor that depends on batch and site alone, not on the layer or the block of queries: made once."""
        return self.of_batch.get(f"{self.site}/{name}", self.batch, make)

    def over_queries(self, values: Tensor, *, only: Tensor | None = None) -> Ratio:
        """Mean over counted queries of values [b h t], limited to `only` [b t]."""
        weights, count = self.query_weights(values.dtype, only)
        return Ratio((values @ weights[:, :, None])[..., 0], count)  # [b h t] · [b t 1]

    def query_weights(self, dtype: torch.dtype, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Counted queries (among `only`) as numbers [b t], and how many [b 1]."""

        def make() -> tuple[Tensor, Tensor]:
            weights = (self.queries if only is None else self.queries & only).to(dtype)
            return weights, weights.sum(dim=-1, keepdim=True)

        owner = self.mask_id if only is None else only
        return self.of_batch.get(f"{self.site}/counted/{dtype}/{self.span}", owner, make)

    @property
    def counted_indices(self) -> tuple[Tensor, Tensor]:
        """Every counted query, sentence by sentence: its row [n] in the batch and its index [n] among b·t positions."""

        def make() -> tuple[Tensor, Tensor]:
            sentence, position = self.host_queries.nonzero(as_tuple=True)  # the host need not wait for a device
            indices = torch.stack([sentence, sentence * self.host_queries.shape[1] + position])
            row, index = upload(indices, self.queries.device)
            return row, index

        return self.shared("counted indices", make)

    def in_blocks(self) -> Iterator[HeadBatch]:
        """The same heads in blocks of queries with their rows of weights; itself, where it has all rows."""
        if self.scores is None:
            yield self
            return
        for queries in self.scores.blocks(TENSORS):
            weights, keys = self.scores.weights(queries)
            visible = self.scores.visibility.visible(queries, keys)[:, 0] & self.key_side.real[:, None, keys]
            yield replace(
                self,
                rows=Rows(weights, visible, keys),
                scores=None,
                context=self.context[:, :, queries],
                queries=self.queries[:, queries],
                host_queries=self.host_queries[:, queries],
                first_query=queries.start,
            )


@dataclass
class ObservedBatch:
    """The batch that passes through the model, and the filter of tokens that count as queries and keys."""

    batch: Batch
    token_filter: CountedTokens = field(default_factory=CountedTokens)
    shared: SharedTensors = field(default_factory=SharedTensors)

    def heads(self, attention_site: AttentionSite, call: AttentionCall) -> HeadBatch:
        """The heads of one call; CheckpointError if its positions differ from the text's."""
        site, batch, device = attention_site.site, self.batch, call.context.device
        if device != batch.source.ids.device:  # the model is spread over several
            batch = self.shared.get(f"batch/{device}", self.batch, lambda: self.batch.to(device))
        query_side, key_side = batch.sides(site)
        expected = (query_side.ids.shape[1], key_side.ids.shape[1])
        size = (call.query.shape[2], call.key.shape[2])
        if size != expected:
            raise CheckpointError(
                f"{site}.{attention_site.layer} attends from {size[0]} to {size[1]} positions where the text has "
                f"{expected[0]} and {expected[1]}; it cannot be analysed token by token"
            )
        host_queries, queries, keys = self.shared.get(f"counted/{site}", batch, lambda: self._count_tokens(batch, site))
        name, mask, shape = f"{id(key_side)}/{size[0]}", call.options.mask, (len(call.query), *size)
        rows, scores = None, None
        mask_id: object
        if call.made_weights is not None:
            spans = slice(0, size[0]), slice(0, size[1])
            visible = self.shared.get(
                f"visible/{name}",
                mask,
                lambda: Visibility(shape, mask=mask, device=device).visible(*spans)[:, 0] & key_side.real[:, None],
            )
            rows, mask_id = Rows(precise(call.made_weights.detach()), visible, spans[1]), visible
        else:
            visibility = self.shared.get(f"visibility/{name}", mask, lambda: Visibility.of(mask, shape, device=device))
            scores = ScoreBlocks.of(call.query.detach(), call.key.detach(), visibility, call.options)
            mask_id = visibility
        return HeadBatch(
            site=site,
            layer=attention_site.layer,
            context=precise(call.context.detach()),
            value=call.value.detach(),
            queries=queries,
            keys=keys,
            query_side=query_side,
            key_side=key_side,
            batch=batch,
            mask_id=mask_id,
            rows=rows,
            scores=scores,
            of_batch=self.shared,
            host_queries=host_queries,
        )

    def _count_tokens(self, batch: Batch, site: Site) -> tuple[Tensor, Tensor, Tensor]:
        """Masks of counted queries [b t] on the CPU and on the device, and of counted keys [b s] on the device."""
        query_side, key_side = batch.on_host.sides(site)
        queries, keys = self.token_filter.queries_of(query_side), self.token_filter.keys_of(key_side)
        queries = queries & keys.any(dim=-1, keepdim=True)
        device = batch.source.ids.device
        return queries, upload(queries, device), upload(keys, device)
