"""Histogram of argmax offsets, key - query (Voita et al. 2019, §5.1)."""

from collections import Counter
from collections.abc import Sequence

from headscope.heads import SiteLayer
from tests.oracles.trace import Trace


def histogram(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Counter[int]:
    return Counter(s - t for t, s in trace.argmax_position(site_layer, head, keep))


def able(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Counter[int]:
    """Number of queries with a counted, visible key at each offset."""
    return Counter(s - t for t, _, keys in trace.rows(site_layer, head, keep) for s in keys)


def modal(histograms: Sequence[Counter[int]], able: Sequence[Counter[int]] = ()) -> int:
    """The most frequent offset; the smallest one where several tie. Of those that most of the queries have a key at."""
    counts, possible = sum(histograms, Counter()), sum(able, Counter())
    offsets = [offset for offset, count in possible.items() if 2 * count > max(possible.values())] or counts
    return min(offsets, key=lambda offset: (-counts[offset], offset))
