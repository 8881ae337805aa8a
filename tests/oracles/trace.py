"""Inputs of the oracles: one sentence at a time, without padding, as plain arrays.

Every oracle of a mean takes a sentence, a place, a head, and whether special tokens count, and returns the
sentence's (sum, count); `oracles.bootstrap` turns the list of them into a number with its interval.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headscope.heads import Site, SiteLayer

Term = tuple[float, float]


@dataclass
class Call:
    """weights [h t s] and context [h t k] of one place, and where each query may look [t s]."""

    weights: np.ndarray
    context: np.ndarray | None
    visible: np.ndarray


@dataclass
class Trace:
    """A sentence, what each attention call did with it, and its words and relations where it has a parse."""

    number: int
    source: list[int]
    source_special: list[bool]
    target: list[int] | None = None
    target_special: list[bool] | None = None
    calls: dict[SiteLayer, Call] = field(default_factory=dict)
    units: list[list[int]] | None = None
    relations: list[tuple[str, int, int]] = field(default_factory=list)
    tie: float = 0.0  # weights nearer than this share of the largest one are equal
    first: int = 0  # tokens before this one do not count

    def without_first(self) -> Trace:
        """Exclude the first token; a word without another piece has no relations."""
        if self.units is not None:
            self.units = [[piece for piece in unit if piece > 0] for unit in self.units]
            self.relations = [entry for entry in self.relations if self.units[entry[1]] and self.units[entry[2]]]
        self.first = 1
        return self

    def query_side(self, site: Site) -> tuple[list[int], list[bool]]:
        """Ids of the queries, and which are special."""
        if site is Site.ENCODER_SELF or self.target is None:
            return self.source, self.source_special
        assert self.target_special is not None
        return self.target, self.target_special

    def key_side(self, site: Site) -> tuple[list[int], list[bool]]:
        """Ids of the keys, and which are special."""
        if site is Site.DECODER_SELF and self.target is not None:
            assert self.target_special is not None
            return self.target, self.target_special
        return self.source, self.source_special

    def keys(self, site: Site, keep: bool) -> list[int]:
        """Positions that count as keys."""
        ids, special = self.key_side(site)
        return [s for s in range(self.first, len(ids)) if keep or not special[s]]

    def queries(self, site: Site, keep: bool) -> list[int]:
        """Positions that count as queries: none where no key counts."""
        ids, special = self.query_side(site)
        if not self.keys(site, keep):
            return []
        return [t for t in range(self.first, len(ids)) if keep or not special[t]]

    def rows(self, site_layer: SiteLayer, head: int, keep: bool) -> Iterator[tuple[int, list[float], list[int]]]:
        """(query, its weights on all keys, keys that count and that it sees)."""
        call = self.calls[site_layer]
        keys = self.keys(site_layer[0], keep)
        visible, weights = call.visible.tolist(), call.weights[head].tolist()
        for t in self.queries(site_layer[0], keep):
            yield t, weights[t], [s for s in keys if visible[t][s]]

    def argmax_position(self, site_layer: SiteLayer, head: int, keep: bool) -> Iterator[tuple[int, int]]:
        """(query, the counted key with its largest weight, the first one where several tie)."""
        for t, row, keys in self.rows(site_layer, head, keep):
            yield t, keys[first_peak([row[s] for s in keys], self.tie)]


def first_peak(values: Sequence[float], tie: float) -> int:
    """Place of the largest value, the first of those that are equal but for rounding."""
    threshold = max(values) * (1 - tie)
    return next(index for index, value in enumerate(values) if value >= threshold)
