"""Tests of means over a corpus whose sentences are the units, and the correction for many of them.

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
import torch
from torch import Tensor

from headscope.bootstrap import Array
from headscope.tails import student_upper_tail

FALSE_DISCOVERIES = 0.05
LEAST_UNITS = 10
"""Sentences that a test needs, and that must be divided in themselves before instances count for more than one each."""


def p_values(
    excess: Tensor, counts: Tensor, *, share: Tensor | Array, null: Tensor | Array | float, divided: Tensor | int = 0
) -> Array:
    """One-sided p of Σ excess / Σ counts ≤ 0, for sums of sentences [g *cells].

    `excess` is what each sentence has above the threshold, times its instances. `share` in [0, 1] is the share that is
    observed and `null` what it would be at the threshold: the variance is that of the null hypothesis. `divided` is
    the number of sentences [*cells] that have hits and misses both.
    """
    mean, variance, freedom = _ratio(excess, counts)
    observed = torch.as_tensor(share, dtype=torch.float64).clamp(0, 1)
    expected = torch.as_tensor(null, dtype=torch.float64).clamp(0, 1)
    at_null, at_share = expected * (1 - expected), observed * (1 - observed)
    scaled = variance * torch.where(at_share > 0, at_null / at_share, 1.0).clamp(min=1)
    least = torch.where(torch.as_tensor(divided) < LEAST_UNITS, at_null / counts.sum(dim=0), 0.0)
    error = torch.maximum(scaled, least).sqrt()
    return student_upper_tail(torch.where(mean == 0, 0.0, mean / error).numpy(), freedom.numpy())


def p_of_difference(total: Tensor, counts: Tensor) -> Array:
    """Two-sided p of Σ total / Σ counts = 0, for sums of sentences [g *cells]; 1 where all are 0."""
    mean, variance, freedom = _ratio(total, counts)
    statistic = torch.where(mean == 0, 0.0, mean.abs() / variance.sqrt())
    return np.minimum(2 * student_upper_tail(statistic.numpy(), freedom.numpy()), 1.0)


def _ratio(total: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Σ total / Σ counts with its variance and degrees of freedom [*cells]."""
    instances = counts.sum(dim=0)
    mean = total.sum(dim=0) / instances
    units = (counts > 0).sum(dim=0)
    variance = units / (units - 1).clamp(min=1) * (total - mean * counts).square().sum(dim=0) / instances**2
    freedom = (instances**2 / counts.square().sum(dim=0) - 1).clamp(min=1)
    return mean, variance, freedom.expand(mean.shape)


def share_p(total: Tensor, counts: Tensor, *, threshold: float) -> Array:
    """One-sided p of the mean of numbers in [0, 1] being at most `threshold`, for sums of sentences [g *cells]."""
    share = total.sum(dim=0) / counts.sum(dim=0)
    return p_values(total - threshold * counts, counts, share=share, null=threshold, divided=_divided(total, counts))


def above_chance(
    total: Tensor, by_chance: Tensor, counts: Tensor, *, threshold: float, times: float
) -> tuple[Array, Array]:
    """One-sided p of a mean of numbers in [0, 1] being at most `threshold`, or at most so many `times` chance.

    Both must be rejected, so it is the larger p (Berger 1982). Sums of sentences [g *cells]; with p comes the threshold
    that was the higher one.
    """
    share, chance = total.sum(dim=0) / counts.sum(dim=0), (times * by_chance).sum(dim=0) / counts.sum(dim=0)
    excess, divided = total - times * by_chance, _divided(total, counts)
    against_chance = p_values(excess, counts, share=share, null=chance, divided=divided)
    p = np.maximum(share_p(total, counts, threshold=threshold), against_chance)
    return p, np.maximum(threshold, chance.numpy())


def _divided(total: Tensor, counts: Tensor) -> Tensor:
    """Sentences [*cells] whose own share is neither 0 nor 1."""
    return ((total > 0) & (total < counts)).sum(dim=0)


def adjust(p: Array) -> Array:
    """Benjamini & Hochberg's adjusted p: at most α exactly where their procedure at α rejects; NaN are no tests."""
    adjusted = np.full_like(p, np.nan)
    tested = np.flatnonzero(~np.isnan(p))
    order = tested[np.argsort(p[tested], kind="stable")]
    scaled = p[order] * len(order) / np.arange(1, len(order) + 1)
    adjusted[order] = np.minimum(np.minimum.accumulate(scaled[::-1])[::-1], 1.0)
    return adjusted
