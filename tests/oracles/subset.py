"""Soft top-K by explicit loops (Li, Cotterell & Sachan 2021), always from the side that is kept."""

from __future__ import annotations

import math


def soft_top_k(scores: list[float], k: int, temperature: float) -> list[float]:
    left, total = list(scores), [0.0] * len(scores)
    for _ in range(k):
        highest = max(left)
        raised = [math.exp((score - highest) / temperature) for score in left]
        shares = [value / sum(raised) for value in raised]
        for place, share in enumerate(shares):
            total[place] += share
            left[place] += math.log(max(1 - share, 1.1754943508222875e-38))
    return total
