"""Soft and hard top-K of importances, for differentiable subset pruning (Li, Cotterell & Sachan 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny
SATURATED = 40.0  # σ(40) is 1 in float64
LARGEST_LOGIT = 300.0  # e⁻³⁰⁰ is a float64 still
BISECTIONS = 64


def gumbel(size: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise [n] in float64."""
    u = torch.rand(size, generator=generator, dtype=torch.float64).clamp(min=TINY)
    return -(-u.log()).log()


def soft_top_k(scores: Tensor, k: int, *, temperature: float) -> Tensor:
    """Gates σ((score − τ) / T) [n], with the one τ that makes their sum K: within [0, 1] for every K and T.

    The limited multi-label projection (Amos, Koltun & Kolter 2019): the largest entropy among all vectors of
    [0, 1]ⁿ with sum K. It becomes the 0/1 vector of the K largest scores [n] as T → 0; what ties at the border
    shares what is left. τ is found by bisection in float64; the gradient is that of the implicit τ.

    Li, Cotterell & Sachan 2021 add up K softmaxes instead, each with the earlier ones masked out; their sum is K
    too, but an entry may exceed 1 (1.9 among 144 heads at K = 12, T = 1), and drawing the n − K that are left out
    (for K > n/2) then gives gates below 0.
    """
    n = len(scores)
    if k in (0, n):
        return torch.full_like(scores, float(k > 0))
    border = scores.detach().topk(k).values[-1]
    logits = ((scores.double() - border) / temperature).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)  # [n], 0 at the border
    low, high = -SATURATED - math.log(n), math.log(n)  # left of `low` no gate changes; at `high` their sum is < K
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.sigmoid(logits.detach() - middle).sum() > k else (low, middle)
    slopes = torch.sigmoid(logits.detach() - low) * torch.sigmoid(low - logits.detach())  # [n], σ′
    mean = (slopes / slopes.sum() * logits).sum()  # dτ = Σ σ′ ds / Σ σ′; its value is taken off again
    return torch.sigmoid(logits - low - (mean - mean.detach())).to(scores)


def top_k(scores: Tensor, k: int) -> Tensor:
    """Which entries [n] are the K largest: exactly K of them, the earlier ones where scores tie."""
    order = torch.argsort(scores.detach(), descending=True, stable=True)
    selected = torch.zeros(len(scores), dtype=torch.bool)
    selected[order[:k]] = True
    return selected


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
