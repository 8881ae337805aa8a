"""Mean weight on the first key, and on special keys; in self attention the first query does not count."""

from headscope.heads import Site, SiteLayer
from tests.oracles.seen import Term, Trace


def _later(seen: Trace, place: SiteLayer, head: int, keep: bool) -> list[list[float]]:
    rows = seen.rows(place, head, keep)
    return [row for t, row, _ in rows if t > 0 or place[0] is Site.CROSS]


def first(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    rows = _later(seen, place, head, keep)
    return sum(row[0] for row in rows), len(rows)


def special(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    _, special = seen.key_side(place[0])
    rows = _later(seen, place, head, keep)
    return sum(row[s] for row in rows for s in range(len(row)) if special[s]), len(rows)


def queries(seen: Trace, place: SiteLayer, head: int, keep: bool, *, only_special: bool) -> Term:
    """How many queries give half of their weight or more to them."""
    _, special = seen.key_side(place[0])
    rows = _later(seen, place, head, keep)
    wanted = special if only_special else [s == 0 for s in range(len(special))]
    return sum(sum(row[s] for s in range(len(row)) if wanted[s]) >= 0.5 for row in rows), len(rows)


def chance(seen: Trace, place: SiteLayer, head: int, keep: bool, *, only_special: bool) -> Term:
    """The weight on them of queries that look at all they see alike."""
    _, special = seen.key_side(place[0])
    total, count = 0.0, 0
    for t, _, _ in seen.rows(place, head, keep):
        if t > 0 or place[0] is Site.CROSS:
            sees = seen.calls[place].visible[t]
            wanted = special if only_special else [s == 0 for s in range(len(special))]
            total += sum(sees[s] for s in range(len(sees)) if wanted[s]) / sum(sees)
            count += 1
    return total, count
