"""Hard concrete gates one at a time, from the density of the concrete distribution, with plain floats."""

from __future__ import annotations

import math

LOW, HIGH = -0.1, 1.1


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def training_gate(log_a: float, u: float, temperature: float) -> float:
    stretched = sigmoid((math.log(u / (1 - u)) + log_a) / temperature) * (HIGH - LOW) + LOW
    return min(1.0, max(0.0, stretched))


def evaluation_gate(log_a: float) -> float:
    return min(1.0, max(0.0, sigmoid(log_a) * (HIGH - LOW) + LOW))


def nonzero(log_a: float, temperature: float) -> float:
    """P(s > -LOW / (HIGH - LOW)) for s = σ((logit u + log_a) / t): u must exceed a bound, and is uniform."""
    edge = -LOW / (HIGH - LOW)
    bound = sigmoid(temperature * math.log(edge / (1 - edge)) - log_a)
    return min(1 - 1e-6, max(1e-6, 1 - bound))
