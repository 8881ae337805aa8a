"""Soft and hard top-K of importances (Li, Cotterell & Sachan 2021: differentiable subset pruning)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny


def gumbel(size: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise [n] in float64."""
    u = torch.rand(size, generator=generator, dtype=torch.float64).clamp(min=TINY)
    return -(-u.log()).log()


def soft_top_k(scores: Tensor, k: int, *, temperature: float) -> Tensor:
    """Σ over K draws of softmax(r / T), where each draw lowers r by −log(1 − p): [n], of sum K at every T.

    It becomes the 0/1 vector of the K largest scores [n] as T → 0; in between an entry may exceed 1. For K > n/2
    the n − K that are left out are drawn from −scores instead, which takes fewer steps and is as exact.
    """
    if 2 * k > len(scores):
        return 1 - soft_top_k(-scores, len(scores) - k, temperature=temperature)
    total, left = torch.zeros_like(scores), scores
    for number in range(k):
        p = torch.softmax(left / temperature, dim=0)
        total = total + p
        if number + 1 < k:
            left = left + (1 - p).clamp(min=TINY).log()
    return total


def top_k(scores: Tensor, k: int) -> Tensor:
    """Which entries [n] are the K largest: exactly K of them, the earlier ones where scores tie."""
    order = torch.argsort(scores.detach(), descending=True, stable=True)
    chosen = torch.zeros(len(scores), dtype=torch.bool)
    chosen[order[:k]] = True
    return chosen


def tied_at(scores: Tensor, k: int) -> Tensor:
    """Which entries [n] have the score that both the last of the K largest and the first of the others have."""
    if not 0 < k < len(scores):
        return torch.zeros(len(scores), dtype=torch.bool)
    ordered = scores.detach().sort(descending=True).values
    return (scores.detach() == ordered[k]) & (ordered[k - 1] == ordered[k])


def tie_remarks(heads: int) -> list[str]:
    """What to say where the scores of so many heads, some of which stay and some of which go, are the same."""
    if not heads:
        return []
    return [f"{heads} heads have the same score, and not all of them stay: which do goes by site, layer and head"]


def straight_through(scores: Tensor, k: int) -> Tensor:
    """The exact top-K as 0/1 [n], with the gradient of the identity."""
    return top_k(scores, k).to(scores) + (scores - scores.detach())


def annealed(update: int, *, first: float, last: float, updates: int) -> float:
    """T after `update` updates: geometric from `first` to `last` within `updates`, then constant."""
    share = min(update / updates, 1.0) if updates else 1.0
    return math.exp(math.log(first) - share * (math.log(first) - math.log(last)))
