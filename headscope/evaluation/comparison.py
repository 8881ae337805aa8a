"""The paired comparison of two models by the same resamples of the sums of a metric."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headscope.bootstrap import LEVEL, Array, Bootstrap
from headscope.evaluation.metrics.base import Metric, resampled_sums

_TAILS = ((1 - LEVEL) / 2, (1 + LEVEL) / 2)


@dataclass(frozen=True)
class Comparison:
    """A model's value with its 95 % interval, and its difference to another model on the same sentences."""

    value: float
    low: float
    high: float
    difference: float
    difference_low: float
    difference_high: float
    p: float


def compare_scores(metric: Metric, sums: Array, reference: Array, bootstrap: Bootstrap) -> Comparison:
    """Paired bootstrap over groups of sentences [g c]: percentile intervals, and a two-sided p-value of the difference.

    p is the share of resampled differences, less their mean, that are at least as far from 0 as the one observed,
    with one added to both counts (Riezler & Maxwell 2005, bootstrap with shift); 1 where all sentences are the same.
    sacreBLEU's paired bootstrap counts the upper tail alone, about half as many.
    """
    return compare(*(resampled(metric, rows, bootstrap) for rows in (sums, reference)))


def resampled(metric: Metric, sums: Array, bootstrap: Bootstrap) -> Array:
    """The metric of sums of groups [g c], and of every resample of groups: [1 + replicates]."""
    return metric.of(resampled_sums(sums, bootstrap))


def losses_left_out(metric: Metric, sums: Array, reference: Array) -> Array:
    """How much worse the metric of sums [g c] is than of a reference [g c]: of all, and without each group [1 + g]."""
    return metric.worse(left_out(metric, sums), left_out(metric, reference))


def left_out(metric: Metric, sums: Array) -> Array:
    """The metric of sums of groups [g c], and without each group: [1 + g]."""
    total = sums.sum(axis=0)
    return metric.of(np.vstack([total, total - sums]))


def compare(values: Array, others: Array) -> Comparison:
    """`compare_scores` of resampled metrics [1 + replicates]."""
    with np.errstate(invalid="ignore"):
        differences = values - others  # [1 + replicates], the observed one first
    if values[0] == others[0]:
        differences[0] = 0.0  # also where both are infinite
    shifted = differences[1:] - differences[1:].mean()
    beyond = int((np.abs(shifted) >= abs(differences[0]) - 1e-12).sum())
    low, high, least, most = (_quantile(numbers[1:], share) for numbers in (values, differences) for share in _TAILS)
    p = (1 + beyond) / (1 + len(shifted)) if np.isfinite(shifted).all() else float("nan")
    return Comparison(float(values[0]), low, high, float(differences[0]), least, most, p)


def _quantile(values: Array, share: float) -> float:
    return float(np.quantile(values, share)) if np.isfinite(values).all() else float("nan")
