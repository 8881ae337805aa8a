"""Quantiles of means with random weights, exact to rounding; those of other distributions are scipy's."""

from __future__ import annotations

import numpy as np

from headscope.bootstrap import Array

STEP = 0.03  # of integrals by equal steps: 1e-8 of what they are, also of 1,024 sentences and one that is lost


def dirichlet_mean_quantile(values: Array, share: float) -> float:
    """Quantile of Σ w_i values_i with weights w of Dirichlet(1, …, 1), to 1e-8 of the values' range.

    Weights are exponentials E_i over their sum, so P(Σ w_i v_i ≤ u) = P(Σ E_i (v_i − u) ≤ 0), solved for u.
    """
    from scipy.optimize import brentq

    numbers, counts = np.unique(values, return_counts=True)
    low, high = float(numbers[0]), float(numbers[-1])
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return high

    def beyond(value: float) -> float:
        inside = low < value < high
        return (exponential_sum_tail(numbers - value, counts.astype(float)) if inside else value == high) - share

    return float(brentq(beyond, low, high, xtol=1e-9 * (high - low)))


def exponential_sum_tail(scales: Array, counts: Array) -> float:
    """P(Σ scales_i E_i ≤ 0) of independent standard exponentials, so many (`counts`) of each scale.

    By inversion of the characteristic function Π (1 − i s t)^−1 (Gil-Pelaez 1951), in equal steps of y, with
    t = exp(y − exp(−y)) in units of the sum's standard deviation.
    """
    scales = scales / np.sqrt(counts @ scales**2)
    coarse = np.arange(1.0, 60.0)
    decay = counts @ np.log1p((scales[:, None] * np.exp(coarse)) ** 2) / 2
    end = coarse[min(int((decay < 36).sum()), len(coarse) - 1)]  # where the integrand is e^−36 at most
    y = np.arange(-3.6, end + STEP, STEP)
    products = scales[:, None] * np.exp(y - np.exp(-y))  # [s n]
    angle = counts @ np.arctan(products)
    size = counts @ np.log1p(products**2) / 2
    return float(0.5 - STEP / np.pi * (np.sin(angle) * np.exp(-size) * (1 + np.exp(-y))).sum())
