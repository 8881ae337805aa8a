"""Beam searches again, one sentence at a time on plain lists; and the search of all sequences there are.

`next_log_p(ids)` gives log p of every id after the ids chosen so far.
"""

from collections.abc import Callable

NextLogP = Callable[[tuple[int, ...]], list[float]]
Beams = list[tuple[tuple[int, ...], float]]


def fairseq(next_log_p: NextLogP, *, beam: int, end: int, pad: int, max_len: int, min_len: int, power: float) -> Beams:
    """Finished hypotheses, best first, as fairseq's generator finds them."""
    alive: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    results: Beams = []
    for step in range(max_len + 1):
        candidates = []
        for ids, score in alive:
            for number, log_p in enumerate(next_log_p(ids)):
                forbidden = number == pad or (step >= max_len and number != end) or (step < min_len and number == end)
                if not forbidden:
                    candidates.append(((*ids, number), score + log_p))
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * beam]
        for ids, score in candidates[:beam]:
            if ids[-1] == end and len(results) < beam:
                results.append((ids, score / len(ids) ** power))
        if len(results) >= beam or step == max_len:
            break
        alive = [c for c in candidates if c[0][-1] != end][:beam]
    return sorted(results, key=lambda c: -c[1])


def story(
    next_log_p: NextLogP, *, beam: int, end: int, max_len: int, min_len: int, power: float, spread: float
) -> Beams:
    """Finished hypotheses, best first, as story-of-heads' decoder finds them."""
    alive: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    results: Beams = []
    best: tuple[tuple[int, ...], float, float] | None = None
    while alive:
        candidates = [
            ((*ids, number), total + log_p) for ids, total in alive for number, log_p in enumerate(next_log_p(ids))
        ]
        candidates = sorted(candidates, key=lambda c: -c[1])[:beam]
        length = len(candidates[0][0])
        empty = best is None or all(number == end for number in best[0])
        scored_candidates = [(ids, total, total / (1 + length / 6) ** power) for ids, total in candidates]
        for ids, total, score in scored_candidates:
            if (ids[-1] == end and length >= min_len) or (length == max_len and empty):
                results.append((ids, score))
                if best is None or score > best[2]:
                    best = (ids, total, score)
        alive = []
        for ids, total, score in scored_candidates:
            near = best is None or (score + spread >= best[2] and total + spread >= best[1])
            if ids[-1] != end and length <= max_len and near:
                alive.append((ids, total))
    return sorted(results, key=lambda c: -c[1])
