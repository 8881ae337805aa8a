"""Likeness of two heads' slices of a projection, and effective ranks of products of slices."""

from math import acos, degrees, exp, log, sqrt

import numpy as np


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Between slices [k d], flattened."""
    return float((a * b).sum() / sqrt((a * a).sum() * (b * b).sum()))


def principal_angles(a: np.ndarray, b: np.ndarray) -> list[float]:
    """Degrees between the row spaces of [k d], smallest first: Björck and Golub 1973, bases by SVD."""
    bases = [np.linalg.svd(m, full_matrices=False)[2] for m in (a, b)]
    cosines = np.linalg.svd(bases[0] @ bases[1].T, compute_uv=False)
    return [degrees(acos(min(1.0, c))) for c in cosines]


def overlap(a: np.ndarray, b: np.ndarray) -> float:
    """tr(P_a P_b) / k with the projectors on the two row spaces."""
    first, second = (m.T @ np.linalg.inv(m @ m.T) @ m for m in (a, b))
    return float(np.trace(first @ second)) / len(a)


def effective_rank(left: np.ndarray, right: np.ndarray) -> float:
    """exp of the entropy of the normalised singular values of the [d d] matrix leftᵀ right."""
    values = np.linalg.svd(left.T @ right, compute_uv=False)
    shares = [v / values.sum() for v in values]
    return exp(-sum(p * log(p) for p in shares if p > 0))
