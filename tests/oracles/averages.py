"""Evenness of the weights on one side of a query, and the weight there, key by key."""

from __future__ import annotations

import math

from tests.oracles.seen import Place, Seen, Term


def term(seen: Seen, place: Place, head: int, keep: bool, *, side: str, what: str) -> Term:
    """Sum over queries with five counted keys on the side, and how many they are."""
    total, count = 0.0, 0
    for t, row, keys in seen.rows(place, head, keep):
        there = [s for s in keys if (s > t if side == "after" else s < t)]
        if len(there) < 5:
            continue
        weight = sum(row[s] for s in there)
        shares = [row[s] / weight for s in there] if weight else []
        entropy = -sum(share * math.log(share) for share in shares if share)
        total += weight if what == "weight" else entropy / math.log(len(there))
        count += 1
    return total, count
