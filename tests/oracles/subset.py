"""Soft top-K by loops in decimal arithmetic: gates σ((score − τ) / T), with τ searched on the whole line."""

import decimal
from decimal import Decimal

CONTEXT = decimal.Context(prec=60, Emin=decimal.MIN_EMIN, Emax=decimal.MAX_EMAX)


def soft_top_k(scores: list[float], k: int, temperature: float) -> list[float]:
    """Gates within [0, 1] of sum K; 0 < K < n."""
    with decimal.localcontext(CONTEXT):
        logits = [Decimal(score) / Decimal(temperature) for score in scores]
        low, high = min(logits) - 1000, max(logits) + 1000
        while high - low > Decimal("1e-30"):
            middle = (low + high) / 2
            if sum(sigmoid(logit - middle) for logit in logits) > k:
                low = middle
            else:
                high = middle
        return [float(sigmoid(logit - low)) for logit in logits]


def sigmoid(x: Decimal) -> Decimal:
    return 1 / (1 + (-x).exp())


def derivative(scores: list[float], k: int, temperature: float, weights: list[float]) -> list[float]:
    """d(Σ weight · gate) / d score by central differences of 1e-6 T."""
    slopes = []
    for index in range(len(scores)):
        ends = []
        for sign in (1, -1):
            point = list(scores)
            point[index] += sign * 1e-6 * temperature
            gates = soft_top_k(point, k, temperature)
            ends.append(sum(weight * gate for weight, gate in zip(weights, gates, strict=True)))
        slopes.append((ends[0] - ends[1]) / (2e-6 * temperature))
    return slopes
