"""Differentiable subset pruning: exactly K heads stay (Li, Cotterell & Sachan 2021).

Deviation: gates in training are a relaxation within [0, 1] (`soft_top_k`), where the paper's sum of softmaxes may
exceed 1. Gumbel noise is added to the importances as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.config import option
from headscope.errors import ConfigError, flag
from headscope.pruning.gate_layout import top_k
from headscope.pruning.learning.learner import GateLearner, learner

TINY = torch.finfo(torch.float32).tiny
SATURATION = 40.0  # σ(40) is 1 in float64
LARGEST_LOGIT = 300.0  # e⁻³⁰⁰ is within the range of float64
BISECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class SubsetOptions:
    """`keep` heads stay; the temperature falls geometrically from `first` to `last` in `cooldown` updates.

    The authors' 0.1 to 1e-8 belongs to their cooldown of 15,000 updates. Below 0.03 gates are almost 0 or 1 and have
    almost no gradient, so a run of a few hundred updates stays at its start (2.16 nats instead of 1.92 with 24 of 72
    heads after 150 updates, benchmarks/pruning/closed-form).

    With `straight_through` the forward pass uses the exact top-K without noise, the backward pass the identity, and
    there is no temperature.
    """

    keep: int = option(help="Heads that stay, of those where heads may go (--sites).", metavar="K", minimum=1)
    first: float = option(1.0, "Of the soft choice at the start; the authors' is 0.1.", name="temperature")
    last: float = option(0.05, "And at the end; the authors' is 1e-8, after 15,000 updates.", name="end-temperature")
    cooldown: int | None = option(
        None, "Updates in which it falls; default: all. The authors' is two thirds.", minimum=1
    )
    straight_through: bool = option(False, "Exact top-K forward, identity backward; no temperature.")

    def __post_init__(self) -> None:
        if not 0 < self.last <= self.first:
            start, end = f"{flag.temperature} {self.first:g}", f"{flag.end_temperature} {self.last:g}"
            raise ConfigError(f"{start} {end}: both must be more than 0, and the end not above the start")


@learner
class Subset(GateLearner):
    """Learns one importance for every unit; the units of the whole model compete for K places.

    The start is Xavier-uniform for a matrix of modules × units of a module. At the end the K largest stay.
    """

    name = "subset"
    summary = "Learn which K heads stay, exactly K: differentiable subset pruning (Li, Cotterell & Sachan 2021)."
    Options = SubsetOptions
    gate_lr = 0.2
    units_to_keep: int

    def start(self) -> Tensor:
        sizes = [len(members) for members in self.gating.members.values()]
        bound = math.sqrt(6 / (len(sizes) + max(sizes)))
        return (2 * torch.rand(len(self.gating.units), generator=self.generator, dtype=torch.float64) - 1) * bound

    @property
    def temperature(self) -> float:
        """The temperature of the next update: geometric from `first` to `last` within `cooldown`, then constant."""
        first, share = math.log(self.options.first), min(self.update / self.cooldown, 1.0) if self.cooldown else 1.0
        return math.exp(first - share * (first - math.log(self.options.last)))

    @property
    def cooldown(self) -> int:
        """The number of updates in which the temperature falls."""
        return max(self.updates, 1) if self.options.cooldown is None else self.options.cooldown

    def training_gates(self) -> Tensor:
        if self.options.straight_through:
            return straight_through(self.weights, self.units_to_keep)
        noisy = self.weights + gumbel(len(self.weights), self.generator)
        return soft_top_k(noisy, self.units_to_keep, temperature=self.temperature)

    def gates(self) -> Tensor:
        return self.decide().double()

    def open_probability(self) -> Tensor:
        """The soft top-K without noise at this temperature, in place of a probability."""
        if self.options.straight_through:
            return self.gates()
        return soft_top_k(self.weights.detach(), self.units_to_keep, temperature=self.temperature)

    def facts(self) -> dict[str, Any]:
        options = self.options
        soft = {"temperature": [options.first, options.last], "cooldown": self.cooldown}
        soft = {} if options.straight_through else soft
        decision = f"the {options.keep} largest importances"
        return {"straight_through": options.straight_through, **soft, "decision": decision}

    def signature(self) -> dict[str, str]:
        return super().signature() | {"gates": "ste" if self.options.straight_through else "gumbel"}

    def trace(self) -> dict[str, float]:
        return {"temperature": self.temperature}


def gumbel(size: int, generator: torch.Generator) -> Tensor:
    """Standard Gumbel noise [n] in float64."""
    u = torch.rand(size, generator=generator, dtype=torch.float64).clamp(min=TINY)
    return -(-u.log()).log()


def soft_top_k(scores: Tensor, k: int, *, temperature: float) -> Tensor:
    """Gates σ((score − τ) / T) [n], with the one τ for which their sum is K: within [0, 1] for every K and T.

    This is the limited multi-label projection (Amos, Koltun & Kolter 2019), the vector in [0, 1]ⁿ with sum K that has
    the largest entropy. As T → 0 it becomes the 0/1 vector of the K largest scores [n]; scores that tie at the border
    share the remainder. τ is found by bisection in float64, and the gradient includes that of τ.

    Li, Cotterell & Sachan 2021 add up K softmaxes instead, each with the earlier choices masked out. Their sum is K
    too, but an entry may exceed 1 (1.9 among 144 heads at K = 12, T = 1); with K > n/2, where the n − K others are
    drawn, gates may be below 0.
    """
    n = len(scores)
    if k in (0, n):
        return torch.full_like(scores, float(k > 0))
    border = scores.detach().topk(k).values[-1]
    logits = ((scores.double() - border) / temperature).clamp(-LARGEST_LOGIT, LARGEST_LOGIT)  # [n], 0 at the border
    low, high = -SATURATION - math.log(n), math.log(n)  # the sum of gates is at least K at `low`, less at `high`
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.sigmoid(logits.detach() - middle).sum() > k else (low, middle)
    slopes = torch.sigmoid(logits.detach() - low) * torch.sigmoid(low - logits.detach())  # [n], σ′
    mean = (slopes / slopes.sum() * logits).sum()  # has the gradient of τ: dτ = Σ σ′ ds / Σ σ′
    return torch.sigmoid(logits - low - (mean - mean.detach())).to(scores)  # adds the gradient, not the value


def straight_through(scores: Tensor, k: int) -> Tensor:
    """The exact top-K as 0/1 [n], with the gradient of the identity."""
    return top_k(scores, k).to(scores) + (scores - scores.detach())
