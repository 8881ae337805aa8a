"""Patterns of pairs that follow from text alone: every query with the earlier keys that bear its mark."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from headscope.distributed import upload
from headscope.model.streaming.visibility import AT_A_TIME, Spans

PAIR = 2 * torch.int32.itemsize
"""Bytes of a pair that is kept."""
LISTED = 64
"""Bytes for each pair while it is found."""


@dataclass(frozen=True)
class EarlierKeys:
    """Marks of queries [b t] and of keys [b s], on the CPU; none is negative but that of keys which nobody looks for.

    A `Match`: which keys [b q s] queries look for, on `device`. Where queries see spans of keys the CPU lists the pairs
    by itself, so that nobody waits for a device, in a time that grows with their number and not with t · s.
    """

    queries: Tensor
    keys: Tensor
    device: torch.device

    @cached_property
    def _there(self) -> tuple[Tensor, Tensor]:
        return upload(self.queries, self.device), upload(self.keys, self.device)

    def __call__(self, queries: slice) -> Tensor:
        """Which keys [b q s] bear the mark of these queries and lie before them."""
        of_queries, of_keys = self._there
        return (of_queries[:, queries, None] == of_keys[:, None]).tril(queries.start - 1)

    def listed(self, seen: Spans, most: int) -> tuple[Tensor, Tensor] | None:
        """All pairs that are `seen`: query · b + sentence, and key [2 n], in this order; and how many queries have.

        The second [t+1] is where the pairs of each query begin, and where the last one's end. Returns None if the pairs
        take over `most` bytes.
        """
        (b, s), t = self.keys.shape, self.queries.shape[1]
        row, place = torch.arange(b)[:, None], torch.arange(s)
        number = 1 + max(int(self.queries.max()), int(self.keys.max()))
        bearing = self.keys >= 0
        ordered = ((row * number + self.keys) * s + place)[bearing].sort().values  # sentence, mark, place
        first = seen.first.expand(b, t)
        end = torch.maximum(first, torch.minimum(seen.end.expand(b, t), torch.arange(t)))
        base = (row * number + self.queries) * s
        low, high = (torch.searchsorted(ordered, (base + bound).T.flatten()) for bound in (first, end))  # [t·b]
        ends = (high - low).cumsum(dim=0)
        pairs, begins = int(ends[-1]), torch.cat([ends.new_zeros(1), ends[b - 1 :: b]])
        if pairs * PAIR > most:
            return None
        found = torch.empty(2, pairs, dtype=torch.int32)
        for part in torch.arange(pairs).split(max(1, AT_A_TIME // LISTED)):
            query = torch.searchsorted(ends, part, right=True)  # and sentence
            found[0, part] = query.int()
            found[1, part] = (ordered[high[query] - ends[query] + part] % s).int()
        return found, begins
