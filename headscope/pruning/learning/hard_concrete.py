"""Hard concrete gates as they are learnt (Louizos et al. 2018; Voita et al. 2019, §5.1; the story-of-heads program).

One number log_a for each gate. The constants are those of the program: temperature 0.33, stretch (−0.1, 1.1),
ε = 1e-6. Gates that a checkpoint brings along, without noise, are `headscope.model.mixing.gates`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headscope.model.mixing.gates import HIGH, LOW, TEMPERATURE, hard_concrete

EPSILON = 1e-6


def initial_log_a(heads: int, generator: torch.Generator) -> Tensor:
    """Glorot's uniform start [h] of a module with that many heads: U(−√(3/h), √(3/h)), in float64.

    The program draws from TensorFlow's generator with a seed made of the variable's name; here it is `generator`.
    """
    bound = math.sqrt(3 / max(heads, 1))
    return (2 * torch.rand(heads, generator=generator, dtype=torch.float64) - 1) * bound


def noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """u ~ U(ε, 1 − ε) in float64."""
    return EPSILON + (1 - 2 * EPSILON) * torch.rand(shape, generator=generator, dtype=torch.float64)


def noisy_gates(log_a: Tensor, u: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """Gates of one training pass: s = σ((ln u − ln(1 − u) + log_a) / t), stretched to (−0.1, 1.1) and clipped."""
    s = torch.sigmoid((u.log() - (-u).log1p() + log_a) / temperature)
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def settled_gates(log_a: Tensor) -> Tensor:
    """Gates of evaluation: σ(log_a), stretched and clipped; no temperature, no noise."""
    return hard_concrete(log_a)


def nonzero_probability(log_a: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """P(g ≠ 0) = σ(log_a − t·ln(0.1 / 1.1)), clipped to [1e-6, 1 − 1e-6]: the penalty of one gate."""
    return torch.sigmoid(log_a - temperature * math.log(-LOW / HIGH)).clamp(EPSILON, 1 - EPSILON)


def one_probability(log_a: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """P(g = 1) = σ(log_a + t·ln(0.1 / 1.1)); it exceeds P(g = 0) exactly where log_a > 0."""
    return torch.sigmoid(log_a + temperature * math.log((HIGH - 1) / (1 - LOW)))


def decided(log_a: Tensor) -> Tensor:
    """Which gates stay: those with P(g = 1) > P(g = 0), which is log_a > 0 (Voita et al. 2019, footnote 7)."""
    return log_a > 0
