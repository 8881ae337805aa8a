"""Percentile bootstrap over sentences, written out: draw sentences, add up, divide, take quantiles."""

from collections.abc import Callable, Sequence

import numpy as np

Estimate = tuple[float, float, float]


def draw_samples(sentences: int, *, seed: int, replicates: int) -> list[list[int]]:
    """For each replicate the sentences that were drawn, some twice, some never (the package's own draws)."""
    random = np.random.default_rng([seed, sentences])
    draws = random.integers(sentences, size=(replicates, sentences)).tolist()
    return [sorted(row) for row in draws]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the sorted values."""
    if not values:
        return float("nan")
    sorted_values = sorted(values)
    position = share * (len(sorted_values) - 1)
    low = int(position)
    high = min(low + 1, len(sorted_values) - 1)
    return sorted_values[low] + (sorted_values[high] - sorted_values[low]) * (position - low)


def interval(statistic: Callable[[list[int]], float], sentences: int, *, seed: int, replicates: int) -> Estimate:
    """A statistic of a list of sentences: its value, and the 2.5 % and 97.5 % quantiles of the replicates."""
    results = [statistic(sample) for sample in draw_samples(sentences, seed=seed, replicates=replicates)]
    finite = [value for value in results if not np.isnan(value)]
    return statistic(list(range(sentences))), quantile(finite, 0.025), quantile(finite, 0.975)


def mean(terms: Sequence[tuple[float, float]], *, seed: int, replicates: int) -> Estimate:
    """Sum of sums over sum of counts, of (sum, count) per sentence."""

    def ratio(sentences: list[int]) -> float:
        count = sum(terms[s][1] for s in sentences)
        return sum(terms[s][0] for s in sentences) / count if count else float("nan")

    return interval(ratio, len(terms), seed=seed, replicates=replicates)
