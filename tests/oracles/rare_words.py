"""Queries that point at the rarest tokens of their sentence (Voita et al. 2019, §5.3)."""

from collections.abc import Sequence

from headscope.heads import Site, SiteLayer
from tests.oracles.seen import Term, Trace

FREQUENT = 500


def ranks(counts: dict[int, int], pieces: Sequence[str], plain: Sequence[int]) -> list[int]:
    """Rank of each id, from 1: by count descending, then by piece; 0 for ids that are no text."""
    ordered = sorted(plain, key=lambda i: (-counts.get(i, 0), pieces[i]))
    return [ordered.index(i) + 1 if i in ordered else 0 for i in range(len(pieces))]


def _rarest(seen: Trace, site: Site, rank: Sequence[int], keep: bool, types: int) -> set[int]:
    """Positions of the `types` rarest pieces, all occurrences; none in a sentence of frequent pieces."""
    ids, _ = seen.key_side(site)
    there = sorted({ids[s] for s in seen.keys(site, keep)}, key=lambda i: -rank[i])
    if not there or rank[there[0]] <= FREQUENT:
        return set()
    return {s for s in seen.keys(site, keep) if ids[s] in there[:types]}


def share(seen: Trace, place: SiteLayer, head: int, keep: bool, *, rank: Sequence[int], types: int) -> Term:
    hits = _rarest(seen, place[0], rank, keep, types)
    argmax_position = [s for _, s in seen.argmax_position(place, head, keep)]
    return (float(sum(s in hits for s in argmax_position)), len(argmax_position)) if hits else (0.0, 0)


def chance(seen: Trace, place: SiteLayer, head: int, keep: bool, *, rank: Sequence[int], types: int) -> Term:
    """Share of hits among the counted keys that a query sees."""
    hits = _rarest(seen, place[0], rank, keep, types)
    total, count = 0.0, 0
    for _, _, keys in seen.rows(place, head, keep) if hits else ():
        total += sum(s in hits for s in keys) / len(keys)
        count += 1
    return total, count
