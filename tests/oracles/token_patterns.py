"""Weight on the previous token, on earlier copies, and on what followed earlier copies (papers.md §6)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.oracles.seen import Place, Seen, Term

Pattern = Callable[[Sequence[int], int, int], bool]


def previous(ids: Sequence[int], t: int, s: int) -> bool:
    return s == t - 1


def duplicate(ids: Sequence[int], t: int, s: int) -> bool:
    return s < t and ids[s] == ids[t]


def induction(ids: Sequence[int], t: int, s: int) -> bool:
    """The token before s is an earlier copy of the query; the query itself is no answer."""
    return 0 < s < t and ids[s - 1] == ids[t]


def score(seen: Seen, place: Place, head: int, keep: bool, *, pattern: Pattern) -> Term:
    """Weight on the counted, visible keys that the pattern names; queries without such a key do not count."""
    ids, _ = seen.query_side(place[0])
    total, count = 0.0, 0
    for t, row, keys in seen.rows(place, head, keep):
        named = [s for s in keys if pattern(ids, t, s)]
        if named:
            total += sum(row[s] for s in named)
            count += 1
    return total, count
