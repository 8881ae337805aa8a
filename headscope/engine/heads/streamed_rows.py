"""Rows of attention weights without the matrix: statistics from one pass, single weights from products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from headscope.distributed import upload
from headscope.engine.heads.earlier_keys import EarlierKeys
from headscope.engine.heads.rows import TIE, DenseRows, Match, SharedTensors, placed
from headscope.errors import HeadscopeError
from headscope.model.streaming.context import block_weights
from headscope.model.streaming.statistics import RowStatistics, ScoreBlocks, row_statistics
from headscope.model.streaming.visibility import KEPT, Visibility, query_blocks

FEW = 64
"""Keys of a set whose weights are made one by one; those of larger sets in blocks of all keys."""
SPARSE = 200
"""Cells of the matrix for each pair, from which on the scores of single pairs are made."""
TENSORS, OBSERVED = 4, 8
"""As large as a block of weights that are there with it, itself among them; where an analysis works on it too."""
PLACES = 72
"""Bytes for the place of a cell of a block that a pattern names, and on the way to it."""


@dataclass
class StreamedRows:
    """Rows of the weights that `scores` make; counted `keys` [b s], and `seen`, the visible keys without padding."""

    scores: ScoreBlocks
    seen: Visibility
    keys: Tensor
    shared: SharedTensors
    gathered: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """What `weight_on_pairs` is to answer for patterns of many pairs, by name."""

    @property
    def weights(self) -> Tensor:
        """HeadscopeError: there is no matrix."""
        raise _missing("weights", self.scores.size)

    @property
    def visible(self) -> Tensor:
        """HeadscopeError: there is no matrix."""
        raise _missing("visible keys", self.scores.size)

    def seen_blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """See `Rows`."""
        for queries, visible in self.seen.blocks():
            yield queries, (visible[:, 0] & self.keys[:, None]).float()

    @property
    def sight(self) -> object:
        """See `Rows`."""
        return self.seen

    @cached_property
    def statistics(self) -> RowStatistics:
        """The statistics of all rows, from one pass."""
        return row_statistics(self.scores, self.keys, tie=TIE[self.scores.query.dtype])

    @property
    def maximum(self) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        return self.statistics.max_weight, self.statistics.argmax_position

    @property
    def entropy(self) -> Tensor:
        """See `Rows`."""
        return self.statistics.entropy

    def weight_on(self, columns: Tensor) -> Tensor:
        """See `Rows`."""
        device, values = self.scores.query.device, placed(self.shared, columns, self.scores.query)  # [b s n]
        occurring = self.shared.get(
            "occurring", columns, lambda: upload(columns.any(dim=0).any(dim=-1).nonzero()[:, 0], device)
        )
        parts = []
        for queries in self._query_blocks(len(occurring) if len(occurring) <= FEW else columns.shape[1]):
            if len(occurring) <= FEW:
                log_sum = self.statistics.log_sum[:, :, queries, None]
                weights, of_keys = (self.scores.block(queries, occurring) - log_sum).exp_(), values[:, occurring]
            else:
                weights, keys = block_weights(self.scores, queries)
                of_keys = values[:, keys]
            parts.append(torch.einsum("bhqs,bsn->bhqn", weights, of_keys))
        return torch.cat(parts, dim=2)

    def visible_on(self, columns: Tensor) -> Tensor:
        """See `Rows`."""
        return self.seen.seen(upload(columns, self.scores.query.device))

    def weight_on_pairs(self, name: str | None, match: Match, *, every_key: bool = False) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        keys = self.keys | every_key
        pairs = (
            self._pairs(match, keys, KEPT // 2)
            if name is None
            else self.shared.get(f"pairs/{name}", self.seen, lambda: self._kept_pairs(match, keys))
        )
        if pairs is None:
            return self._weight_on_many(match, keys)
        b, _, t, s = self.scores.size
        if pairs.places.shape[1] * SPARSE < b * t * s:
            sums = PairSums.of(self)
            for scores, part in self._single_scores(pairs.places):
                sums.add(scores, part)
            return sums.result
        if name is None:
            return self._gathered({"": pairs})[""]
        patterns: dict[str, PairWeights] = self.shared.get("patterns", self.seen, dict)
        patterns[name] = pairs
        if name not in self.gathered:
            self.gathered |= self._gathered(patterns)
        return self.gathered[name]

    def _gathered(self, patterns: Mapping[str, PairWeights]) -> dict[str, tuple[Tensor, Tensor]]:
        """The results of all patterns that layers before asked for, from one walk over blocks of scores.

        Blocks take less time than many single scores, and most of it whether one pattern reads them or several.
        """
        sums = {name: PairSums.of(self) for name in patterns}
        for queries in self._query_blocks(self.scores.size[3]):
            low, _, _, high = self.scores.visibility.bounds(queries)
            block = self.scores.block(queries, slice(low, high), all_visible=self.scores.visibility.spans is not None)
            for name, pairs in patterns.items():
                part = self._places(pairs.places[:, pairs.begins[queries.start] : pairs.begins[queries.stop]])
                sums[name].add(block[part[0], :, part[1] - queries.start, part[2] - low], part)
        return {name: of_pattern.result for name, of_pattern in sums.items()}

    def _single_scores(self, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scores [n h] of pairs, as `_pairs` gives them one by one, with their places [3 n]."""
        _, h, _, k = self.scores.query.shape
        for part in query_blocks(pairs.shape[1], TENSORS * h * k * self.scores.query.itemsize + PLACES):
            places = self._places(pairs[:, part])
            yield self.scores.pairs(*places), places

    def _kept_pairs(self, match: Match, keys: Tensor) -> PairWeights | None:
        """`_pairs` for all layers of the batch; None if they would be too many beside those of other patterns."""
        kept: list[Tensor] = self.shared.get("kept pairs", None, list)
        most = min(KEPT // 2, KEPT - sum(others.nbytes for others in kept))
        if isinstance(match, EarlierKeys) and self.seen.spans is not None and self.seen.real is None:
            listed = match.listed(self.seen.spans, most)
            pairs = None if listed is None else PairWeights(upload(listed[0], keys.device), listed[1].tolist())
        else:
            pairs = self._pairs(match, keys, most)
        kept.extend([] if pairs is None else [pairs.places])
        return pairs

    def _pairs(self, match: Match, keys: Tensor, most: int) -> PairWeights | None:
        """Every match. Returns None if they take over `most` bytes. Of a device their number is read."""
        found, size = [], 0
        for queries, matches in self._matches(match, keys):
            query, sentence, key = matches.transpose(0, 1).nonzero(as_tuple=True)
            found.append(torch.stack([((query + queries.start) * len(keys) + sentence).int(), key.int()]))
            size += found[-1].nbytes
            if size > most:
                return None
        places = torch.cat(found, dim=1)
        firsts = torch.arange(self.scores.size[2] + 1, dtype=torch.int32, device=places.device) * len(keys)
        return PairWeights(places, torch.searchsorted(places[0].contiguous(), firsts).tolist())

    def _places(self, pairs: Tensor) -> Tensor:
        """Sentence, query and key [3 n] of pairs [2 n]."""
        row, key = pairs.long()
        return torch.stack([row % len(self.keys), row // len(self.keys), key])

    def _matches(self, match: Match, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for queries, visible in self.seen.blocks():
            yield queries, match(queries) & visible[:, 0] & keys[:, None]

    def _weight_on_many(self, match: Match, counted: Tensor) -> tuple[Tensor, Tensor]:
        b, h, t, s = self.scores.size
        total, any_key = self.scores.query.new_empty(b, h, t), self.keys.new_empty(b, t)  # no small ones between blocks
        for queries in self._query_blocks(s):
            weights, keys = block_weights(self.scores, queries)
            matches = match(queries) & self.seen.visible(queries, slice(0, s))[:, 0] & counted[:, None]
            total[:, :, queries] = torch.einsum("bhqn,bqn->bhq", weights, matches[..., keys].to(weights.dtype))
            any_key[:, queries] = matches.any(dim=-1)
        return total, any_key

    def _query_blocks(self, keys: int, *, tensors: int = TENSORS) -> Iterator[slice]:
        b, h, t, _ = self.scores.size
        return query_blocks(t, b * max(1, keys) * (tensors * h * self.scores.query.itemsize + PLACES))

    def blocks(self) -> Iterator[tuple[slice, DenseRows]]:
        """The weights of blocks of queries on all keys, one after the other."""
        s = self.scores.size[3]
        for queries in self._query_blocks(s, tensors=OBSERVED):
            weights, keys = block_weights(self.scores, queries)
            whole = torch.nn.functional.pad(weights, (keys.start, s - keys.stop))
            visible = self.seen.visible(queries, slice(0, s))[:, 0].expand(len(whole), -1, -1)
            yield queries, DenseRows(whole, visible, self.keys, SharedTensors(), queries.start)


@dataclass(frozen=True)
class PairWeights:
    """Matches of a pattern: query · b + sentence, and key [2 n], in this order.

    `begins` [t+1] says where the matches of each query begin, and where the last one's end.
    """

    places: Tensor
    begins: list[int]


@dataclass(frozen=True)
class PairSums:
    """Sums of the weights of pairs by query: `total` [b·t h], and which queries have a pair [b·t]."""

    rows: StreamedRows
    total: Tensor
    any_key: Tensor

    @classmethod
    def of(cls, rows: StreamedRows) -> PairSums:
        """Of no pair."""
        b, h, t, _ = rows.scores.size
        total = rows.scores.query.new_zeros(b * t, h)
        return cls(rows, total, torch.zeros(b * t, dtype=torch.bool, device=total.device))

    def add(self, scores: Tensor, pairs: Tensor) -> None:
        """Pairs [3 n] with their scores [n h], which are overwritten."""
        sentence, query, _ = pairs
        place = sentence * self.rows.scores.size[2] + query
        weights = scores.sub_(self.rows.statistics.log_sum[sentence, :, query]).exp_()
        self.total.index_add_(0, place, weights)
        self.any_key.index_fill_(0, place, True)

    @property
    def result(self) -> tuple[Tensor, Tensor]:
        """Weights [b h t] and whether there is any key [b t]."""
        b, h, t, _ = self.rows.scores.size
        return self.total.view(b, t, h).transpose(1, 2), self.any_key.view(b, t)


def _missing(what: str, size: tuple[int, int, int, int]) -> HeadscopeError:
    return HeadscopeError(
        f"an analysis asks for the {what} of {size[2]} × {size[3]} positions, which are streamed; it has to declare "
        'reads = "matrix" or "rows", or takes --attention dense'
    )
