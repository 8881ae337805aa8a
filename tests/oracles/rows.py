"""Columns of heads.csv that are means over queries, each with its number of one sentence, place and head."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.oracles import averages, confidence, distance, entropy, rare_words, sink, token_patterns
from tests.oracles.seen import Term

RANKS = [(17 * number) % 53 * 13 for number in range(53)]  # 0 … 676: some pieces are among the 500 most frequent
ORACLES: dict[str, Callable[..., Term]] = {
    "confidence": confidence.voita,
    "sharpness": confidence.sharpness,
    "confidence_base": confidence.base,
    "confidence_advanced": confidence.advanced,
    "confidence_pairwise": confidence.pairwise,
    "entropy": entropy.entropy,
    "entropy_share": entropy.share,
    "distance": distance.distance,
    "sink": sink.first,
    "sink_special": sink.special,
    "sink_queries": partial(sink.queries, only_special=False),
    "sink_special_queries": partial(sink.queries, only_special=True),
    **{
        f"{side}_{what}": partial(averages.term, side=side, what=what)
        for side in ("after", "before")
        for what in ("evenness", "weight")
    },
    "rarest": partial(rare_words.share, rank=RANKS, types=1),
    "rarest_two": partial(rare_words.share, rank=RANKS, types=2),
    "rarest_chance": partial(rare_words.chance, rank=RANKS, types=1),
    "rarest_two_chance": partial(rare_words.chance, rank=RANKS, types=2),
    "previous_token": partial(token_patterns.score, pattern=token_patterns.previous),
    "duplicate_token": partial(token_patterns.score, pattern=token_patterns.duplicate),
    "induction": partial(token_patterns.score, pattern=token_patterns.induction),
}
