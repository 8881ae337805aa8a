"""Columns of heads.csv that are means over queries, each with its number of one sentence, place and head."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from headscope.heads import SiteLayer
from tests.oracles import confidence, rare_words, sink
from tests.oracles.trace import Term, Trace

Pattern = Callable[[Sequence[int], int, int], bool]


def distance(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    steps = [abs(t - s) for t, s in trace.argmax_position(site_layer, head, keep)]
    return float(sum(steps)), len(steps)


def _nats(row: list[float]) -> float:
    return -sum(w * math.log(w) for w in row if w > 0)


def entropy(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """Over whole rows: special keys are part of the distribution even where they do not count."""
    rows = [row for _, row, _ in trace.rows(site_layer, head, keep)]
    return sum(map(_nats, rows)), len(rows)


def entropy_share(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """Queries that see one key have no maximum to share and do not count."""
    total, count = 0.0, 0
    for t, row, _ in trace.rows(site_layer, head, keep):
        sees = sum(bool(s) for s in trace.calls[site_layer].visible[t])
        if sees > 1:
            total += _nats(row) / math.log(sees)
            count += 1
    return total, count


def one_side(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, side: str, measure: str) -> Term:
    """Sum over queries with five counted keys on the side, and how many they are."""
    total, count = 0.0, 0
    for t, row, keys in trace.rows(site_layer, head, keep):
        keys_there = [s for s in keys if (s > t if side == "after" else s < t)]
        if len(keys_there) < 5:
            continue
        weight = sum(row[s] for s in keys_there)
        shares = [row[s] / weight for s in keys_there] if weight else []
        nats = _nats(shares)
        total += weight if measure == "weight" else nats / math.log(len(keys_there))
        count += 1
    return total, count


def previous(ids: Sequence[int], t: int, s: int) -> bool:
    return s == t - 1


def duplicate(ids: Sequence[int], t: int, s: int) -> bool:
    return s < t and ids[s] == ids[t]


def induction(ids: Sequence[int], t: int, s: int) -> bool:
    """The token before s is an earlier copy of the query; the query itself is no answer."""
    return 0 < s < t and ids[s - 1] == ids[t]


def weight_on_pattern(trace: Trace, site_layer: SiteLayer, head: int, keep: bool, *, pattern: Pattern) -> Term:
    """Weight on the counted, visible keys that the pattern names; queries without such a key do not count."""
    ids, _ = trace.query_side(site_layer[0])
    total, count = 0.0, 0
    for t, row, keys in trace.rows(site_layer, head, keep):
        matches = [s for s in keys if pattern(ids, t, s)]
        if matches:
            total += sum(row[s] for s in matches)
            count += 1
    return total, count


RANKS = [(17 * number) % 53 * 13 for number in range(53)]  # 0 … 676: some pieces are among the 500 most frequent
ORACLES: dict[str, Callable[..., Term]] = {
    "confidence": confidence.voita,
    "sharpness": confidence.sharpness,
    "confidence_base": confidence.base,
    "confidence_advanced": confidence.advanced,
    "confidence_pairwise": confidence.pairwise,
    "entropy": entropy,
    "entropy_share": entropy_share,
    "distance": distance,
    "sink": sink.first,
    "sink_special": sink.special,
    "sink_queries": partial(sink.queries, only_special=False),
    "sink_special_queries": partial(sink.queries, only_special=True),
    **{
        f"{side}_{measure}": partial(one_side, side=side, measure=measure)
        for side in ("after", "before")
        for measure in ("evenness", "weight")
    },
    "rarest": partial(rare_words.share, rank=RANKS, types=1),
    "rarest_two": partial(rare_words.share, rank=RANKS, types=2),
    "rarest_chance": partial(rare_words.chance, rank=RANKS, types=1),
    "rarest_two_chance": partial(rare_words.chance, rank=RANKS, types=2),
    "previous_token": partial(weight_on_pattern, pattern=previous),
    "duplicate_token": partial(weight_on_pattern, pattern=duplicate),
    "induction": partial(weight_on_pattern, pattern=induction),
}
