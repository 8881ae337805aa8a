"""Differentiable subset pruning: exactly K heads (Li, Cotterell & Sachan 2021).

Deviation: gates of training are an exact relaxation within [0, 1] (`soft_top_k`), where the paper's sum of softmaxes
may exceed 1, and Gumbel noise is added to the importances as there.
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
LARGEST_LOGIT = 300.0  # e⁻³⁰⁰ is a float64 still
BISECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class SubsetOptions:
    """`keep` heads; the temperature falls geometrically from `first` to `last` in `cooldown` updates.

    The authors' 0.1 to 1e-8 belongs to their cooldown of 15,000 updates: from 0.03 on gates are all but 0 or 1 and have
    no gradient, so that a run of a few hundred updates freezes as it began (2.16 nats instead of 1.92 with 24 of 72
    heads after 150 updates, benchmarks/pruning/closed-form).

    With `straight_through` the forward pass takes the exact top-K without noise, the backward pass the identity, and
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
    """One importance for every unit of the whole model; heads compete for K places.

    The start is Xavier's for a matrix of modules × units of a module. At the end the K largest stay.
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
        """Of the next update: geometric from `first` to `last` within `cooldown`, then constant."""
        first, share = math.log(self.options.first), min(self.update / self.cooldown, 1.0) if self.cooldown else 1.0
        return math.exp(first - share * (first - math.log(self.options.last)))

    @property
    def cooldown(self) -> int:
        """Updates until the temperature has fallen."""
        return max(self.updates, 1) if self.options.cooldown is None else self.options.cooldown

    def training_gates(self) -> Tensor:
        if self.options.straight_through:
            return straight_through(self.weights, self.units_to_keep)
        noisy = self.weights + gumbel(len(self.weights), self.generator)
        return soft_top_k(noisy, self.units_to_keep, temperature=self.temperature)

    def gates(self) -> Tensor:
        return self.decide().double()

    def open_probability(self) -> Tensor:
        """Not a probability proper: the soft top-K without noise at this temperature."""
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
    low, high = -SATURATION - math.log(n), math.log(n)  # left of `low` no gate changes; at `high` their sum is < K
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if torch.sigmoid(logits.detach() - middle).sum() > k else (low, middle)
    slopes = torch.sigmoid(logits.detach() - low) * torch.sigmoid(low - logits.detach())  # [n], σ′
    mean = (slopes / slopes.sum() * logits).sum()  # dτ = Σ σ′ ds / Σ σ′; its value is taken off again
    return torch.sigmoid(logits - low - (mean - mean.detach())).to(scores)


def straight_through(scores: Tensor, k: int) -> Tensor:
    """The exact top-K as 0/1 [n], with the gradient of the identity."""
    return top_k(scores, k).to(scores) + (scores - scores.detach())
