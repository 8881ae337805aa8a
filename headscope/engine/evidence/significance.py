"""Tests of means over a corpus whose sentences are the units, their correction for many, and rank correlations.

The value is a ratio of sums over sentences, and its variance that of a ratio (Cochran 1977, §6; CR1 of Cameron & Miller
2015), with Student's t and as many degrees of freedom as there are sentences of effect, (Σn)² / Σn² − 1 (Kish 1965).
Shares near 1, on which all sentences agree, would have no variance at all; so that of a share is taken where the null
hypothesis puts it, with the design effect that is observed: Wilson's score test (1927) with the effective sample size,
which holds its level where Wald's does not (Franco et al. 2019). A design effect below 1 is believed where at least ten
sentences have hits and misses both (a head that misses one token of every sentence); elsewhere the variance is never
less than that of independent instances.
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
    """Spearman's ρ, tied values with their mean rank; NaN where a list is constant, lacks a number or has one."""
    pair = np.array([first, second], dtype=float)
    if np.isnan(pair).any() or any(len(np.unique(values)) < 2 for values in pair):
        return float("nan")
    return float(np.corrcoef(pd.DataFrame(pair).rank(axis=1))[0, 1])


def row_spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ [r] of two matrices [r n], row by row; tied ones have their mean rank, constant rows no number."""
    ranks = (torch.tensor(pd.DataFrame(values.numpy()).rank(axis=1).to_numpy()) for values in (first, second))
    return row_pearson(*ranks)


def row_pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's r [r] of two matrices [r n], row by row; constant rows have no number."""
    one, other = (values - values.mean(dim=1, keepdim=True) for values in (first, second))
    return (one * other).sum(dim=1) / (one.square().sum(dim=1) * other.square().sum(dim=1)).sqrt()


def kendall(first: ArrayLike, second: ArrayLike) -> float:
    """Kendall's τ-b; NaN where a list is constant."""
    lists = (np.asarray(values, dtype=float) for values in (first, second))
    a, b = (np.sign(values[:, None] - values[None, :]) for values in lists)
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else float("nan")


FALSE_DISCOVERIES = 0.05


def p_values(total: Tensor, baseline: Tensor, counts: Tensor, *, threshold: float, may_divide: bool = False) -> Array:
    """One-sided p of a share being at most `threshold` above a baseline, for sums of sentences [g *cells].

    `may_divide`: design effects below 1 are believed where sentences enough have hits and misses both.
    """
    share, sentence_deviations, freedom = _ratio(total, counts)  # and others: what sentences differ by [g *cells]
    base, of_baseline, _ = _ratio(baseline, counts)
    null = (base + threshold).clamp(0, 1)
    at_null, at_share = null * (1 - null), (share * (1 - share)).clamp(min=0)
    scale = torch.where(at_share > 0, at_null / at_share, 1.0).clamp(min=1).sqrt()
    variance = _variance(sentence_deviations * scale - of_baseline, counts)
    divided_sentences = ((total > 0) & (total < counts)).sum(dim=0) * may_divide  # [*cells]
    least_variance = torch.where(divided_sentences < MIN_UNITS, at_null / counts.sum(dim=0), 0.0)
    mean, error = share - base - threshold, torch.maximum(variance, least_variance).sqrt()
    return stdtr(freedom.numpy(), -torch.where(mean == 0, 0.0, mean / error).numpy())


def p_of_difference(total: Tensor, counts: Tensor) -> Array:
    """Two-sided p of Σ total / Σ counts = 0, for sums of sentences [g *cells]; 1 where all are 0, NaN of just one."""
    mean, differences, freedom = _ratio(total, counts)
    statistic = torch.where(mean == 0, 0.0, mean.abs() / _variance(differences, counts).sqrt())
    statistic = torch.where((counts > 0).sum(dim=0) > 1, statistic, torch.nan)
    return np.minimum(2 * stdtr(freedom.numpy(), -statistic.numpy()), 1.0)


def _ratio(total: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ total / Σ counts [*cells], how every sentence differs from it [g *cells], and degrees of freedom."""
    instances = counts.sum(dim=0)
    mean = total.sum(dim=0) / instances
    return mean, total - mean * counts, (instances**2 / counts.square().sum(dim=0) - 1).clamp(min=1)


def _variance(differences: Tensor, counts: Tensor) -> Tensor:
    """Of a ratio from which sentences differ so [g *cells]: [*cells]."""
    units = (counts > 0).sum(dim=0)
    return units / (units - 1).clamp(min=1) * differences.square().sum(dim=0) / counts.sum(dim=0) ** 2


def share_p(total: Tensor, counts: Tensor, *, threshold: float) -> Array:
    """One-sided p of the mean of numbers in [0, 1] being at most `threshold`, for sums of sentences [g *cells]."""
    return p_values(total, torch.zeros_like(total), counts, threshold=threshold, may_divide=True)


def above_chance(
    total: Tensor, by_chance: Tensor, counts: Tensor, *, threshold: float, times: float
) -> tuple[Array, Array]:
    """One-sided p of a mean of numbers in [0, 1] being at most `threshold`, or at most `times` chance.

    Both must be rejected, so it is the larger p (Berger 1982). Sums of sentences [g *cells]; with p comes the threshold
    that was the higher one.
    """
    chance = times * by_chance
    against_chance = p_values(total, chance, counts, threshold=0, may_divide=True)
    p = np.maximum(share_p(total, counts, threshold=threshold), against_chance)
    return p, np.maximum(threshold, (chance.sum(dim=0) / counts.sum(dim=0)).numpy())


def adjust(p: Array) -> Array:
    """Benjamini & Hochberg's adjusted p: at most α exactly where their procedure at α rejects; NaN are no tests."""
    adjusted_p = np.full_like(p, np.nan)
    testable = np.flatnonzero(~np.isnan(p))
    order = testable[np.argsort(p[testable], kind="stable")]
    step_p = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted_p[order] = np.minimum(np.minimum.accumulate(step_p[::-1])[::-1], 1.0)
    return adjusted_p
