"""Mean weight on the first key, and on special keys; in self attention the first query does not count."""

from __future__ import annotations

from headscope.heads import Site
from tests.oracles.seen import Place, Seen, Term


def _later(seen: Seen, place: Place, head: int, keep: bool) -> list[list[float]]:
    rows = seen.rows(place, head, keep)
    return [row for t, row, _ in rows if t > 0 or place[0] is Site.CROSS]


def first(seen: Seen, place: Place, head: int, keep: bool) -> Term:
    rows = _later(seen, place, head, keep)
    return sum(row[0] for row in rows), len(rows)


def special(seen: Seen, place: Place, head: int, keep: bool) -> Term:
    _, special = seen.key_side(place[0])
    rows = _later(seen, place, head, keep)
    return sum(row[s] for row in rows for s in range(len(row)) if special[s]), len(rows)
