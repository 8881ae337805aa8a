"""Tails and quantiles of the distributions that tests and intervals are made of, exact to rounding."""

from __future__ import annotations

from functools import cache
from math import comb
from statistics import NormalDist

import numpy as np
import torch

from headscope.bootstrap import Array

POINTS, WEIGHTS = np.polynomial.legendre.leggauss(96)
STEP = 0.03  # of integrals by equal steps: 1e-8 of what they are, also of 1,024 sentences and one that is lost


def normal_quantile(share: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(share)


def normal_upper_tail(z: Array) -> Array:
    """P(Z > z) of a standard normal."""
    tail: Array = (torch.special.erfc(torch.from_numpy(np.asarray(z)) / 2**0.5) / 2).numpy()
    return tail


def binomial_upper_tails(trials: int) -> Array:
    """P(so many or more of `trials` succeed) [trials + 1] where each does with probability 1/2, from none on."""
    tails = [sum(comb(trials, number) for number in range(least, trials + 1)) for least in range(trials + 1)]
    return np.array([tail / 2**trials for tail in tails])


def student_upper_tail(statistic: Array, freedom: Array) -> Array:
    """P(T > t) for Student's T with ν degrees of freedom: with t = √ν cot φ the integral of sin^(ν−1) from 0 to φ.

    By 96 points of Gauss and Legendre over its last 12 / √ν, before which it is e^−72 of its value there at most; below
    0 by symmetry; NaN for NaN.
    """
    end = np.maximum(np.arctan2(np.sqrt(freedom), np.abs(statistic)), 1e-300)[..., None]  # 0 … π/2
    power, begin = freedom[..., None] - 1, np.maximum(end - 12 / np.sqrt(freedom)[..., None], 0)
    middle = (end - begin) / 2
    integral = (middle * WEIGHTS * np.exp(power * np.log(np.sin(begin + middle * (POINTS + 1))))).sum(axis=-1)
    half = torch.from_numpy(np.asarray(freedom)) / 2
    constant = (torch.lgamma(half + 0.5) - torch.lgamma(half)).exp().numpy() / np.sqrt(np.pi)
    tail: Array = np.where(statistic < 0, 1 - constant * integral, constant * integral)
    return tail


@cache
def student_quantile(share: float, freedom: int) -> float:
    """Quantile of Student's t with `freedom` ≥ 1 degrees, above a half, by bisection of its tail."""
    low, high = 0.0, 1e4
    while high - low > 1e-9 * max(high, 1):
        middle = (low + high) / 2
        tail = float(student_upper_tail(np.array([middle]), np.array([float(freedom)]))[0])
        low, high = (middle, high) if tail > 1 - share else (low, middle)
    return (low + high) / 2


def dirichlet_mean_quantile(values: Array, share: float) -> float:
    """Quantile of Σ w_i values_i with weights w of Dirichlet(1, …, 1), to 1e-8 of the values' range.

    Weights are exponentials E_i over their sum, so P(Σ w_i v_i ≤ u) = P(Σ E_i (v_i − u) ≤ 0), solved for u by false
    position (Illinois: an end that stays counts half).
    """
    numbers, counts = np.unique(values, return_counts=True)
    low, high = float(numbers[0]), float(numbers[-1])
    if high - low <= 1e-12 * max(abs(low), abs(high)):
        return high
    precision = 1e-9 * (high - low)
    below, above, missed, middle = -share, 1 - share, 0.0, low
    while high - low > precision:
        before, last = missed, middle
        middle = (low * above - high * below) / (above - below)
        missed = exponential_sum_tail(numbers - middle, counts.astype(float)) - share
        if abs(middle - last) <= precision or missed == 0:
            break
        if missed < 0:
            low, below, above = middle, missed, above / (2 if before < 0 else 1)
        else:
            high, above, below = middle, missed, below / (2 if before > 0 else 1)
    return middle


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
