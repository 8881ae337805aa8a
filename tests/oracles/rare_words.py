"""Queries that point at the rarest tokens of their sentence (Voita et al. 2019, §5.3)."""

from collections.abc import Sequence

from headscope.heads import Site, SiteLayer
from tests.oracles.trace import Term, Trace

FREQUENT = 500


def ranks(counts: dict[int, int], pieces: Sequence[str], plain: Sequence[int]) -> list[int]:
    """Rank of each id, from 1: by count descending, then by piece; 0 for ids that are no text."""
    order = sorted(plain, key=lambda i: (-counts.get(i, 0), pieces[i]))
    return [order.index(i) + 1 if i in order else 0 for i in range(len(pieces))]


def _rarest(trace: Trace, site: Site, rank: Sequence[int], keep: bool, types: int) -> set[int]:
    """Positions of the `types` rarest pieces, all occurrences; none in a sentence of frequent pieces."""
    ids, _ = trace.key_side(site)
    candidates = sorted({ids[s] for s in trace.keys(site, keep)}, key=lambda i: -rank[i])
    if not candidates or rank[candidates[0]] <= FREQUENT:
        return set()
    return {s for s in trace.keys(site, keep) if ids[s] in candidates[:types]}


def share(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, rank: Sequence[int], types: int) -> Term:
    hits = _rarest(trace, site_layer[0], rank, keep, types)
    argmax_position = [s for _, s in trace.argmax_position(site_layer, head, keep)]
    return (float(sum(s in hits for s in argmax_position)), len(argmax_position)) if hits else (0.0, 0)


def chance(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, rank: Sequence[int], types: int) -> Term:
    """Share of hits among the counted keys that a query sees."""
    hits = _rarest(trace, site_layer[0], rank, keep, types)
    total, count = 0.0, 0
    for _, _, keys in trace.rows(site_layer, head, keep) if hits else ():
        total += sum(s in hits for s in keys) / len(keys)
        count += 1
    return total, count
