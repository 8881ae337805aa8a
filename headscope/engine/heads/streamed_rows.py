"""Rows of attention weights without the matrix: statistics from one pass, single weights from products."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.engine.heads.rows import TIE, DenseRows, Match
from headscope.engine.heads.shared import SharedTensors
from headscope.errors import HeadscopeError
from headscope.model.streaming.context import block_weights
from headscope.model.streaming.scores import ScoreBlocks
from headscope.model.streaming.statistics import RowStatistics, row_statistics
from headscope.model.streaming.visibility import Visibility

FEW = 64
"""Keys of a set whose weights are made one by one; those of larger sets in blocks of all keys."""
PAIRS = 2**22
"""Pairs of a pattern that are kept for all layers of a batch, at 12 bytes each."""
SPARSE = 200
"""Cells of the matrix for each pair, from which on the scores of single pairs are made."""
CELLS = 2**22
LEAST = 16
"""Weights, or elements of gathered queries, that are there at a time."""


@dataclass
class StreamedRows:
    """Rows of the weights that `scores` make; counted `keys` [b s], and `seen`, the visible keys without padding."""

    scores: ScoreBlocks
    seen: Visibility
    keys: Tensor
    shared: SharedTensors

    @property
    def weights(self) -> Tensor:
        """HeadscopeError: there is no matrix."""
        raise _missing("weights", self.scores.size)

    @property
    def visible(self) -> Tensor:
        """HeadscopeError: there is no matrix."""
        raise _missing("visible keys", self.scores.size)

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
        occurring = columns.any(dim=0).any(dim=-1).nonzero()[:, 0]
        values = columns.to(self.scores.query.dtype)  # [b s n]
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
        return self.seen.seen(columns)

    def weight_on_pairs(self, name: str, match: Match, *, every_key: bool = False) -> tuple[Tensor, Tensor]:
        """See `Rows`."""
        keys = self.keys | every_key
        pairs = self.shared.get(f"pairs/{name}", self.seen, lambda: self._pairs(match, keys))
        if pairs is None:
            return self._weight_on_many(match, keys)
        b, h, t, s = self.scores.size
        total = self.scores.query.new_zeros(b * t, h)
        any_key = torch.zeros(b * t, dtype=torch.bool, device=total.device)
        sparse = pairs.shape[1] * SPARSE < b * t * s
        for scores, (sentence, query, _) in self._single_scores(pairs) if sparse else self._gathered_scores(pairs):
            weights = (scores - self.statistics.log_sum[sentence, :, query]).exp_()  # [n h]
            total.index_add_(0, sentence * t + query, weights)
            any_key.index_fill_(0, sentence * t + query, True)
        return total.view(b, t, h).transpose(1, 2), any_key.view(b, t)

    def _single_scores(self, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Scores [n h] of pairs [3 n], from the products of each pair alone."""
        _, h, _, k = self.scores.query.shape
        for part in pairs.split(max(1, CELLS // (h * k)), dim=1):
            yield self.scores.pairs(*part.long()), part.long()

    def _gathered_scores(self, pairs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The same from blocks of scores, which take less time than many single ones."""
        pairs = pairs[:, pairs[1].argsort()]
        for queries in self._query_blocks(self.scores.size[3]):
            low, _, _, high = self.scores.visibility.bounds(queries)
            first, end = torch.searchsorted(
                pairs[1].contiguous(), pairs.new_tensor([queries.start, queries.stop])
            ).tolist()
            part = pairs[:, first:end].long()
            block = self.scores.block(queries, slice(low, high), all_visible=self.scores.visibility.spans is not None)
            yield block[part[0], :, part[1] - queries.start, part[2] - low], part

    def _pairs(self, match: Match, keys: Tensor) -> Tensor | None:
        """Sentence, query and key of every match [3 n]; None where there are too many to keep."""
        found, count = [], 0
        for queries, matches in self._matches(match, keys):
            sentence, query, key = matches.nonzero(as_tuple=True)
            found.append(torch.stack([sentence, query + queries.start, key]).int())
            count += len(key)
            if count > PAIRS:
                return None
        return torch.cat(found, dim=1)

    def _matches(self, match: Match, keys: Tensor) -> Iterator[tuple[slice, Tensor]]:
        for queries, visible in self.seen.blocks():
            yield queries, match(queries) & visible[:, 0] & keys[:, None]

    def _weight_on_many(self, match: Match, counted: Tensor) -> tuple[Tensor, Tensor]:
        s = self.scores.size[3]
        totals, any_key = [], []
        for queries in self._query_blocks(s):
            weights, keys = block_weights(self.scores, queries)
            matches = match(queries) & self.seen.visible(queries, slice(0, s))[:, 0] & counted[:, None]
            totals.append(torch.einsum("bhqn,bqn->bhq", weights, matches[..., keys].to(weights.dtype)))
            any_key.append(matches.any(dim=-1))
        return torch.cat(totals, dim=2), torch.cat(any_key, dim=1)

    def _query_blocks(self, keys: int) -> Iterator[slice]:
        b, h, t, _ = self.scores.size
        step = max(LEAST, CELLS // (b * h * max(1, keys)))
        for start in range(0, t, step):
            yield slice(start, min(start + step, t))

    def blocks(self) -> Iterator[tuple[slice, DenseRows]]:
        """The weights of blocks of queries on all keys, one after the other."""
        s = self.scores.size[3]
        for queries in self._query_blocks(s):
            weights, keys = block_weights(self.scores, queries)
            whole = torch.nn.functional.pad(weights, (keys.start, s - keys.stop))
            visible = self.seen.visible(queries, slice(0, s))[:, 0].expand(len(whole), -1, -1)
            yield queries, DenseRows(whole, visible, self.keys, SharedTensors(), queries.start)


def _missing(what: str, size: tuple[int, int, int, int]) -> HeadscopeError:
    return HeadscopeError(
        f"an analysis asks for the {what} of {size[2]} × {size[3]} positions, which are streamed; it has to declare "
        'reads = "matrix" or "rows", or takes --attention dense'
    )
