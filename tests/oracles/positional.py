"""Histogram of argmax offsets, key - query (Voita et al. 2019, §5.1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tests.oracles.seen import Place, Seen


def histogram(seen: Seen, place: Place, head: int, keep: bool) -> Counter[int]:
    return Counter(s - t for t, s in seen.argmax_position(place, head, keep))


def modal(histograms: Sequence[Counter[int]]) -> int:
    """The most frequent offset; the smallest one where several tie."""
    every = sum(histograms, Counter())
    return min(every, key=lambda offset: (-every[offset], offset))
