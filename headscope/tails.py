"""Tails and quantiles of the distributions that tests and intervals are made of, exact to rounding."""

from __future__ import annotations

from functools import cache
from math import comb
from statistics import NormalDist

import numpy as np
import torch

from headscope.bootstrap import Array

POINTS, WEIGHTS = np.polynomial.legendre.leggauss(96)


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
