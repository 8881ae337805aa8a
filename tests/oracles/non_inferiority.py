"""Is a pruned model as good as the whole one? Sentences are left out one by one, and fractions added up."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from statistics import fmean, stdev
from typing import Any

Sums = Sequence[Sequence[float]]
STUDENT = {1: 6.3138, 2: 2.9200, 3: 2.3534, 4: 2.1318, 9: 1.8331, 12: 1.7823, 16: 1.7459, 30: 1.6973, 99: 1.6604}
"""One-sided 95 % quantiles from a table, by degrees of freedom."""
OF_TWO = {1: 12.7062, 16: 2.1199}
"""97.5 %, for two methods together."""


def judge(
    metric: Callable[[Any], float],
    pairs: Sequence[tuple[Sums, Sums]],
    *,
    margin: float,
    ruin: Callable[[Sequence[float]], Sequence[float]] | None,
    higher_is_better: bool = True,
    level: float = 0.95,
    fewest: int = 60,
) -> dict[str, Any]:
    """The verdict on (whole, pruned) sums of sentences, a pair a seed of pruning.

    `ruin` makes of a sentence's sums those of one that is wrong altogether; without it that costs the whole value.
    """
    sentences, student = len(pairs[0][0]), STUDENT if level == 0.95 else OF_TWO

    def worse(seed: int, subset: Sequence[int]) -> float:
        whole_value, pruned = (metric([model[sentence] for sentence in subset]) for model in pairs[seed])
        return whole_value - pruned if higher_is_better else pruned - whole_value

    ids, seeds = list(range(sentences)), range(len(pairs))
    gaps = [worse(seed, ids) for seed in seeds]
    estimate, intact = fmean(gaps), list(pairs[0][0])
    wrong = [metric([*intact[:i], ruin(line), *intact[i + 1 :]]) for i, line in enumerate(intact)] if ruin else [0.0]
    largest = max(metric(intact) - value for value in wrong) * (sentences if ruin else 1)
    without = [fmean(worse(seed, ids[:left] + ids[left + 1 :]) for seed in seeds) for left in ids]
    losses = [estimate + (sentences - 1) * (fmean(without) - value) for value in without]
    error, spread = (stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0 for values in (losses, gaps))
    apart = student[len(pairs) - 1] * spread if len(pairs) > 1 else 0.0

    def reach(values: Sequence[float], bound: float, beyond: float = 1.25) -> float:
        bound = max(bound, fmean(values) + beyond * (max(values) - fmean(values)))
        return max(mean_limit([*values, bound], level) - fmean(values), student[sentences - 1] * error)

    above = math.hypot(reach(losses, largest, 1.0 if ruin else 1.25), apart)
    below = math.hypot(reach([-loss for loss in losses], -math.inf), apart)
    high, low = estimate + above, estimate - below
    verdict = "worse" if low > margin else "not established"
    return {
        "worse": estimate,
        "worse_limit": high,
        "margin": margin,
        "detectable": above + 0.8416212 * math.hypot(error, spread),
        "level": level,
        "verdict": "non-inferior" if high <= margin and sentences >= fewest else verdict,
    }


def mean_limit(values: Sequence[float], level: float) -> float:
    """The quantile of means with weights of Dirichlet(1, …, 1), by bisection of exact partial fractions."""
    spread = max(values) - min(values)
    apart = [Fraction(value) + number * Fraction(spread) / 10**11 for number, value in enumerate(values)]  # no ties
    low, high = min(apart), max(apart)
    for _ in range(32):
        middle = Fraction(float(low + high) / 2)
        low, high = (middle, high) if 1 - exceeds(apart, middle) < level else (low, middle)
    return float(high)


def exceeds(values: Sequence[Fraction], limit: Fraction) -> Fraction:
    """P(Σ E_i (value_i − limit) > 0) of exponentials E: Σ over those above of Π_j (v_i − u) / (v_i − v_j)."""
    exceeding = Fraction(0)
    for i, value in enumerate(values):
        if value > limit:
            other_values = [other for j, other in enumerate(values) if j != i]
            exceeding += math.prod(((value - limit) / (value - other) for other in other_values), start=Fraction(1))
    return exceeding
