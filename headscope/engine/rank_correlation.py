"""Rank correlations of two lists of numbers, tied ones with their mean rank."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def spearman(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's ρ; NaN where a list is constant, lacks a number or has fewer than two."""
    pair = [np.asarray(values, dtype=float) for values in (first, second)]
    if any(np.isnan(values).any() or len(np.unique(values)) < 2 for values in pair):
        return float("nan")
    return float(np.corrcoef([ranked(values) for values in pair])[0, 1])


def row_spearman(first: Tensor, second: Tensor) -> Tensor:
    """Spearman's ρ [r] of two matrices [r n], row by row; tied ones have their mean rank, constant rows no number."""
    one, other = (torch.from_numpy(np.stack([ranked(row) for row in values.numpy()])) for values in (first, second))
    return row_pearson(one, other)


def row_pearson(first: Tensor, second: Tensor) -> Tensor:
    """Pearson's r [r] of two matrices [r n], row by row; constant rows have no number."""
    one, other = (values - values.mean(dim=1, keepdim=True) for values in (first, second))
    return (one * other).sum(dim=1) / (one.square().sum(dim=1) * other.square().sum(dim=1)).sqrt()


def ranked(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 1; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    means: NDArray[np.float64] = last - (counts - 1) / 2
    return means[inverse.reshape(-1)]


def kendall(first: ArrayLike, second: ArrayLike) -> float:
    """Kendall's τ-b; NaN where a list is constant."""
    lists = (np.asarray(values, dtype=float) for values in (first, second))
    a, b = (np.sign(values[:, None] - values[None, :]) for values in lists)
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum()) / norm if norm else float("nan")
