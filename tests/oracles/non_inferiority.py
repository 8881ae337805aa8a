"""Is a pruned model as good as the whole one? Sentences are drawn again and again, one by one, and losses sorted."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import stdev
from typing import Any

import numpy as np

from tests.oracles.bootstrap import drawn, quantile

Sums = Sequence[Sequence[float]]
STUDENT = {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 9: 1.8331, 12: 1.7823, 16: 1.7459, 30: 1.6973, 99: 1.6604}
"""One-sided 95 % quantiles from a table, by degrees of freedom."""


def judged(
    metric: Callable[[Any], float],
    pairs: Sequence[tuple[Sums, Sums]],
    *,
    margin: float,
    seed: int,
    replicates: int,
    higher_is_better: bool = True,
) -> dict[str, Any]:
    """The verdict on (whole, pruned) sums of sentences, a pair a seed of pruning; the package's own draws."""
    sentences = len(pairs[0][0])

    def worse(chosen: Sequence[int], seeds: Sequence[int]) -> float:
        losses = []
        for number in seeds:
            whole, pruned = (metric([model[sentence] for sentence in chosen]) for model in pairs[number])
            losses.append(whole - pruned if higher_is_better else pruned - whole)
        return sum(losses) / len(losses)

    every = range(sentences)
    observed, baseline = worse(every, range(len(pairs))), abs(metric(list(pairs[0][0])))
    draws = zip(
        drawn(sentences, seed=seed, replicates=replicates),
        drawn(len(pairs), seed=seed, replicates=replicates),
        strict=True,
    )
    losses = [worse(chosen, seeds) for chosen, seeds in draws]
    error = stdev(losses) * math.sqrt(sentences / (sentences - 1)) if sentences > 1 else 0.0
    if error <= 1e-6 * baseline:  # (1 - p)^n = 5 %: that many may be lost without one of n showing it
        unseen = (1 - 0.05 ** (1 / sentences)) * baseline
        low, high, detectable = observed - unseen, observed + unseen, unseen
    else:
        reach = STUDENT[sentences - 1] * error
        low = min(quantile(losses, 0.05), observed - reach)
        high = max(quantile(losses, 0.95), observed + reach)
        detectable = (1.6448536 + 0.8416212) * error
    verdict = "non-inferior" if high <= margin else "worse" if low > margin else "not established"
    return {
        "worse": observed,
        "worse_limit": high,
        "margin": margin,
        "detectable": detectable,
        "verdict": verdict,
    }


def share_confirmed(losses: Callable[[np.random.Generator], Sequence[float]], margin: float, *, texts: int) -> float:
    """How often a text of single losses, with a mean that is estimated, is confirmed to be within the margin."""
    random = np.random.default_rng(7)
    confirmed = 0
    for _ in range(texts):
        sample = list(losses(random))
        error = stdev(sample) / math.sqrt(len(sample))
        confirmed += sum(sample) / len(sample) + STUDENT[len(sample) - 1] * error <= margin
    return confirmed / texts
