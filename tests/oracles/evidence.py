"""Evidence for labels, written out: sums in loops, Student's tail by the trapezium rule, the step-up procedure."""

import math
from collections.abc import Sequence

Row = tuple[float, float, float]
"""Of one sentence: the hits of a head, those of its baseline, and the instances."""


def tail(statistic: float, freedom: float, *, steps: int = 200_000) -> float:
    """P(T > t): the density from t on, with x = t + u / (1 − u), 0 ≤ u < 1."""
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(freedom * math.pi)

    def height(u: float) -> float:
        x = statistic + u / (1 - u)
        return float(scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2) / (1 - u) ** 2)

    inner = sum(height(number / steps) for number in range(1, steps))
    return (height(0.0) / 2 + inner) / steps


def p_value(rows: Sequence[Row], threshold: float, *, steps: int = 20_000) -> float:
    """P-value of: the hits over the baseline are a share of at most `threshold` of all instances."""
    rows = [row for row in rows if row[2]]
    instances = sum(row[2] for row in rows)
    share, base_share = (sum(row[number] for row in rows) / instances for number in (0, 1))
    mean, null = share - base_share - threshold, min(base_share + threshold, 1.0)
    scale = max(1.0, null * (1 - null) / (share * (1 - share))) if 0 < share < 1 else 1.0
    off = sum((math.sqrt(scale) * (hits - share * n) - (base - base_share * n)) ** 2 for hits, base, n in rows)
    variance = len(rows) / (len(rows) - 1) * off / instances**2
    variance = max(variance, null * (1 - null) / instances)
    freedom = max(instances**2 / sum(row[2] ** 2 for row in rows) - 1, 1.0)
    return tail(mean / math.sqrt(variance), freedom, steps=steps) if mean else 0.5


def bh_rejections(p: Sequence[float], level: float) -> set[int]:
    """Benjamini & Hochberg: of m tests the k smallest p, for the largest k whose p is at most k / m of the level."""
    order = sorted(range(len(p)), key=lambda number: p[number])
    count = max((k for k in range(1, len(p) + 1) if p[order[k - 1]] <= level * k / len(p)), default=0)
    return set(order[:count])
