"""Entropy of attention rows in nats, and as a share of that of a uniform row (papers.md §6)."""

from __future__ import annotations

from math import log

from tests.oracles.seen import Place, Seen, Term


def _row(row: list[float]) -> float:
    return -sum(w * log(w) for w in row if w > 0)


def entropy(seen: Seen, place: Place, head: int, keep: bool) -> Term:
    """Over whole rows: special keys are part of the distribution even where they do not count."""
    rows = [row for _, row, _ in seen.rows(place, head, keep)]
    return sum(map(_row, rows)), len(rows)


def share(seen: Seen, place: Place, head: int, keep: bool) -> Term:
    """Queries that see one key have no maximum to share and do not count."""
    total, count = 0.0, 0
    for t, row, _ in seen.rows(place, head, keep):
        sees = sum(bool(s) for s in seen.calls[place].visible[t])
        if sees > 1:
            total += _row(row) / log(sees)
            count += 1
    return total, count
