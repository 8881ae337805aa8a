"""Mean |query - argmax key| of self attention."""

from __future__ import annotations

from tests.oracles.seen import Place, Seen, Term


def distance(seen: Seen, place: Place, head: int, keep: bool) -> Term:
    away = [abs(t - s) for t, s in seen.argmax_position(place, head, keep)]
    return float(sum(away)), len(away)
