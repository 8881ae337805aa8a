"""Mean largest weight (Voita et al. 2019, §4), and the three definitions of the MHR fork, of which one cell by cell."""

import numpy as np
from numpy.typing import NDArray

from headscope.heads import Site, SiteLayer
from tests.oracles.seen import Call, Term, Trace


def voita(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    total, count = 0.0, 0
    for _, row, keys in seen.rows(place, head, keep):
        total += max(row[s] for s in keys)
        count += 1
    return total, count


def sharpness(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    """The same of queries that see five keys, over the weight that even ones would have."""
    total, chance = 0.0, 0.0
    for _, row, keys in seen.rows(place, head, keep):
        if len(keys) >= 5:
            total += max(row[s] for s in keys)
            chance += 1 / len(keys)
    return total, chance


def _without_last_cell(seen: Trace, place: SiteLayer, head: int) -> np.ndarray:
    weights: np.ndarray = seen.calls[place].weights[head].copy()
    weights[-1, -1] = 0.0
    return weights


def base(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: max over keys, max over queries; one number per sentence; all tokens count."""
    largest = 0.0
    for row in _without_last_cell(seen, place, head):
        for weight in row:
            largest = max(largest, weight)
    return largest, 1


def advanced(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: max over queries for each key, summed, over S - 1; nothing for a single key."""
    weights = _without_last_cell(seen, place, head)
    queries, keys = weights.shape
    if keys == 1:
        return 0.0, 0
    return sum(max(weights[t, s] for t in range(queries)) for s in range(keys)) / (keys - 1), 1


def pairwise(seen: Trace, place: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: Euclidean distance of the head's map to each head's, added up; not divided."""
    mine, total = _without_last_cell(seen, place, head), 0.0
    queries, keys = mine.shape
    for other in range(len(seen.calls[place].weights)):
        theirs = _without_last_cell(seen, place, other)
        total += sum((mine[t, s] - theirs[t, s]) ** 2 for t in range(queries) for s in range(keys)) ** 0.5
    return total, 1


def sentence_score(method: str, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """`base`, `advanced` or `pairwise` of weights [h t s]; the last query's weight on the last key counts as 0."""
    score, place = {"base": base, "advanced": advanced, "pairwise": pairwise}[method], (Site.CROSS, 0)
    seen = Trace(0, [], [], calls={place: Call(weights, None, weights)})
    return np.array([score(seen, place, head, True)[0] for head in range(len(weights))])
