"""Beam searches again, one sentence at a time on plain lists; and the search of all sequences there are.

`next_log_p(ids)` gives log p of every id after the ids chosen so far.
"""

from collections.abc import Callable

NextLogP = Callable[[tuple[int, ...]], list[float]]
Found = list[tuple[tuple[int, ...], float]]


def fairseq(next_log_p: NextLogP, *, beam: int, end: int, pad: int, most: int, least: int, power: float) -> Found:
    """Ended hypotheses, best first, as fairseq's generator finds them."""
    alive: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    ended: Found = []
    for step in range(most + 1):
        candidates = []
        for ids, score in alive:
            for number, log_p in enumerate(next_log_p(ids)):
                banned = number == pad or (step >= most and number != end) or (step < least and number == end)
                if not banned:
                    candidates.append(((*ids, number), score + log_p))
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * beam]
        for ids, score in candidates[:beam]:
            if ids[-1] == end and len(ended) < beam:
                ended.append((ids, score / len(ids) ** power))
        if len(ended) >= beam or step == most:
            break
        alive = [c for c in candidates if c[0][-1] != end][:beam]
    return sorted(ended, key=lambda c: -c[1])


def story(next_log_p: NextLogP, *, beam: int, end: int, most: int, least: int, power: float, spread: float) -> Found:
    """Hypotheses that counted, best first, as story-of-heads' decoder finds them."""
    alive: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    counted: Found = []
    best: tuple[tuple[int, ...], float, float] | None = None
    while alive:
        candidates = [
            ((*ids, number), total + log_p) for ids, total in alive for number, log_p in enumerate(next_log_p(ids))
        ]
        candidates = sorted(candidates, key=lambda c: -c[1])[:beam]
        length = len(candidates[0][0])
        empty = best is None or all(number == end for number in best[0])
        scored = [(ids, total, total / (1 + length / 6) ** power) for ids, total in candidates]
        for ids, total, score in scored:
            if (ids[-1] == end and length >= least) or (length == most and empty):
                counted.append((ids, score))
                if best is None or score > best[2]:
                    best = (ids, total, score)
        alive = []
        for ids, total, score in scored:
            near = best is None or (score + spread >= best[2] and total + spread >= best[1])
            if ids[-1] != end and length <= most and near:
                alive.append((ids, total))
    return sorted(counted, key=lambda c: -c[1])
