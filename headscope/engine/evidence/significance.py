"""Tests of means over a corpus with sentences as units, their correction for many tests, and rank correlations.

The value is a ratio of sums over sentences, and its variance that of a ratio (Cochran 1977, §6; CR1 of Cameron & Miller
2015), with Student's t. The degrees of freedom are the effective number of sentences less one, (Σn)² / Σn² − 1 (Kish
1965). A share near 1 on which all sentences agree would have no variance, so a share is tested with the variance under
the null hypothesis and the observed design effect: Wilson's score test (1927) with the effective sample size, which
holds its level where Wald's does not (Franco et al. 2019). A design effect below 1 is trusted only if at least ten
sentences have both hits and misses (as with a head that misses one token of every sentence); otherwise the variance is
at least that of independent instances.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike
from scipy.special import stdtr
from torch import Tensor

from headscope.bootstrap import Array
from headscope.config.option import MIN_UNITS


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's ρ, tied values with their mean rank; NaN if a list is constant, has a NaN or a single value."""
    pair = np.array([first, second], dtype=float)
    if np.isnan(pair).any() or any(len(np.unique(values)) < 2 for values in pair):
        return float("nan")
    return float(np.corrcoef(pd.DataFrame(pair).rank(axis=1))[0, 1])


def row_spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ [r] of two matrices [r n], row by row, tied values with their mean rank; NaN for constant rows."""
    ranks = (torch.tensor(pd.DataFrame(values.numpy()).rank(axis=1).to_numpy()) for values in (first, second))
    return row_pearson(*ranks)


def row_pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's r [r] of two matrices [r n], row by row; NaN for constant rows."""
    one, other = (values - values.mean(dim=1, keepdim=True) for values in (first, second))
    return (one * other).sum(dim=1) / (one.square().sum(dim=1) * other.square().sum(dim=1)).sqrt()


def kendall(first: ArrayLike, second: ArrayLike) -> float:
    """Kendall's τ-b; NaN where a list is constant."""
    lists = (np.asarray(values, dtype=float) for values in (first, second))
    a, b = (np.sign(values[:, None] - values[None, :]) for values in lists)
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else float("nan")


FALSE_DISCOVERIES = 0.05  # share of wrong ones among the rejections, at most, as an expectation


def p_values(total: Tensor, baseline: Tensor, counts: Tensor, *, threshold: float, may_divide: bool = False) -> Array:
    """One-sided p of a share being at most `threshold` above a baseline, for sums of sentences [g *cells].

    With `may_divide` design effects below 1 are trusted if enough sentences have both hits and misses.
    """
    share, deviations, freedom = _ratio(total, counts)
    base, base_deviations, _ = _ratio(baseline, counts)
    null = (base + threshold).clamp(0, 1)
    null_variance, share_variance = null * (1 - null), (share * (1 - share)).clamp(min=0)  # of one instance
    scale = torch.where(share_variance > 0, null_variance / share_variance, 1.0).clamp(min=1).sqrt()
    variance = _variance(deviations * scale - base_deviations, counts)
    divided_sentences = ((total > 0) & (total < counts)).sum(dim=0) * may_divide  # [*cells]
    least_variance = torch.where(divided_sentences < MIN_UNITS, null_variance / counts.sum(dim=0), 0.0)
    mean, error = share - base - threshold, torch.maximum(variance, least_variance).sqrt()
    return stdtr(freedom.numpy(), -torch.where(mean == 0, 0.0, mean / error).numpy())


def p_of_difference(total: Tensor, counts: Tensor) -> Array:
    """Two-sided p of Σ total / Σ counts = 0, for sums of sentences [g *cells]; 1 if all are 0, NaN for one sentence."""
    mean, deviations, freedom = _ratio(total, counts)
    statistic = torch.where(mean == 0, 0.0, mean.abs() / _variance(deviations, counts).sqrt())
    statistic = torch.where((counts > 0).sum(dim=0) > 1, statistic, torch.nan)
    return np.minimum(2 * stdtr(freedom.numpy(), -statistic.numpy()), 1.0)


def _ratio(total: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ total / Σ counts [*cells], every sentence's deviation from it [g *cells], and degrees of freedom [*cells]."""
    instances = counts.sum(dim=0)
    mean = total.sum(dim=0) / instances
    return mean, total - mean * counts, (instances**2 / counts.square().sum(dim=0) - 1).clamp(min=1)


def _variance(deviations: Tensor, counts: Tensor) -> Tensor:
    """The variance [*cells] of a ratio, from every sentence's deviation from it [g *cells]."""
    units = (counts > 0).sum(dim=0)
    return units / (units - 1).clamp(min=1) * deviations.square().sum(dim=0) / counts.sum(dim=0) ** 2


def share_p(total: Tensor, counts: Tensor, *, threshold: float) -> Array:
    """One-sided p of the mean of numbers in [0, 1] being at most `threshold`, for sums of sentences [g *cells]."""
    return p_values(total, torch.zeros_like(total), counts, threshold=threshold, may_divide=True)


def above_chance(
    total: Tensor, by_chance: Tensor, counts: Tensor, *, threshold: float, times: float
) -> tuple[Array, Array]:
    """One-sided p of a mean of numbers in [0, 1] being at most `threshold`, or at most `times` chance.

    Both hypotheses must be rejected, so the larger p counts (Berger 1982). Arguments are sums of sentences [g *cells];
    the higher of the two thresholds is returned with p.
    """
    chance = times * by_chance
    against_chance = p_values(total, chance, counts, threshold=0, may_divide=True)
    p = np.maximum(share_p(total, counts, threshold=threshold), against_chance)
    return p, np.maximum(threshold, (chance.sum(dim=0) / counts.sum(dim=0)).numpy())


def adjust(p: Array) -> Array:
    """Benjamini & Hochberg's adjusted p: at most α exactly where their procedure rejects at α; a NaN is not a test."""
    adjusted_p = np.full_like(p, np.nan)
    testable = np.flatnonzero(~np.isnan(p))
    order = testable[np.argsort(p[testable], kind="stable")]
    step_p = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted_p[order] = np.minimum(np.minimum.accumulate(step_p[::-1])[::-1], 1.0)
    return adjusted_p
