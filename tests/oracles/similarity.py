"""Likeness of two heads: cosine and L2 of contexts, Jensen-Shannon of weights, linear CKA."""

from math import log, sqrt

import numpy as np

from headscope.heads import SiteLayer
from tests.oracles.trace import Term, Trace


def _contexts(trace: Trace, site_layer: SiteLayer, head: int, keep: bool) -> list[np.ndarray]:
    context = trace.calls[site_layer].context
    assert context is not None
    return [context[head, t] for t in trace.queries(site_layer[0], keep)]


def cosine(trace: Trace, site_layer: SiteLayer, pair: tuple[int, int], keep: bool) -> Term:
    total, tokens = 0.0, list(zip(*(_contexts(trace, site_layer, head, keep) for head in pair), strict=True))
    for x, y in tokens:
        total += sum(x * y) / sqrt(sum(x * x) * sum(y * y))
    return total, len(tokens)


def l2(trace: Trace, site_layer: SiteLayer, pair: tuple[int, int], keep: bool) -> Term:
    tokens = list(zip(*(_contexts(trace, site_layer, head, keep) for head in pair), strict=True))
    return sum(sqrt(sum((x - y) ** 2)) for x, y in tokens), len(tokens)


def _kl(p: np.ndarray, q: np.ndarray) -> float:
    return float(sum(a * log(a / b) for a, b in zip(p, q, strict=True) if a > 0))


def jensen_shannon(trace: Trace, site_layer: SiteLayer, pair: tuple[int, int], keep: bool) -> Term:
    weights = trace.calls[site_layer].weights
    total, queries = 0.0, trace.queries(site_layer[0], keep)
    for t in queries:
        p, q = (weights[head, t] for head in pair)
        total += _kl(p, (p + q) / 2) / 2 + _kl(q, (p + q) / 2) / 2
    return total, len(queries)


def cka(
    corpus: list[Trace], site_layer: SiteLayer, pair: tuple[int, int], keep: bool, *, sample: list[Trace] | None = None
) -> float:
    """Kornblith et al. 2019, with the matrices themselves: one row a token (drawn twice, twice).

    Both are centred on the mean over the corpus, whatever the sample.
    """
    means = [np.mean([c for s in corpus for c in _contexts(s, site_layer, head, keep)], axis=0) for head in pair]
    x, y = (
        np.array([c for s in (corpus if sample is None else sample) for c in _contexts(s, site_layer, head, keep)])
        for head in pair
    )
    x, y = x - means[0], y - means[1]
    norms = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(np.linalg.norm(y.T @ x) ** 2 / norms)
