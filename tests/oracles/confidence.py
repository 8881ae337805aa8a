"""Mean largest weight (Voita et al. 2019, §4), and the three definitions of the MHR fork, of which one cell by cell."""

import numpy as np
from numpy.typing import NDArray

from headscope.heads import Site, SiteLayer
from tests.oracles.trace import Call, Term, Trace


def voita(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    total, count = 0.0, 0
    for _, row, keys in trace.rows(site_layer, head, keep):
        total += max(row[s] for s in keys)
        count += 1
    return total, count


def sharpness(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """Largest weight over the weight of even attention, of queries that see five keys."""
    total, chance = 0.0, 0.0
    for _, row, keys in trace.rows(site_layer, head, keep):
        if len(keys) >= 5:
            total += max(row[s] for s in keys)
            chance += 1 / len(keys)
    return total, chance


def _without_last_cell(trace: Trace, site_layer: SiteLayer, head: int) -> np.ndarray:
    weights: np.ndarray = trace.calls[site_layer].weights[head].copy()
    weights[-1, -1] = 0.0
    return weights


def base(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: max over keys, max over queries; one number per sentence; all tokens count."""
    largest = 0.0
    for row in _without_last_cell(trace, site_layer, head):
        for weight in row:
            largest = max(largest, weight)
    return largest, 1


def advanced(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: max over queries for each key, summed, over S - 1; nothing for a single key."""
    weights = _without_last_cell(trace, site_layer, head)
    queries, keys = weights.shape
    if keys == 1:
        return 0.0, 0
    return sum(max(weights[t, s] for t in range(queries)) for s in range(keys)) / (keys - 1), 1


def pairwise(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> Term:
    """mhr.md §4.1: Euclidean distance of the head's map to each head's, added up; not divided."""
    own_map, total = _without_last_cell(trace, site_layer, head), 0.0
    queries, keys = own_map.shape
    for other in range(len(trace.calls[site_layer].weights)):
        other_map = _without_last_cell(trace, site_layer, other)
        total += sum((own_map[t, s] - other_map[t, s]) ** 2 for t in range(queries) for s in range(keys)) ** 0.5
    return total, 1


def sentence_score(method: str, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """`base`, `advanced` or `pairwise` of weights [h t s]; the last query's weight on the last key counts as 0."""
    score, site_layer = {"base": base, "advanced": advanced, "pairwise": pairwise}[method], (Site.CROSS, 0)
    trace = Trace(0, [], [], calls={site_layer: Call(weights, None, weights)})
    return np.array([score(trace, site_layer, head, True)[0] for head in range(len(weights))])
