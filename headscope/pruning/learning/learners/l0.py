"""Hard concrete gates with a penalty on open ones (Louizos et al. 2018; Voita et al. 2019, §5.1).

Each gate has one parameter, log_a. The constants are those of the story-of-heads program: temperature 0.33, stretch
(−0.1, 1.1), ε = 1e-6. Gates of a checkpoint itself, without noise, are in `headscope.model.mixing.base`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from headscope.config import option
from headscope.errors import check_one_given, flag
from headscope.model.mixing.base import HIGH, LOW, TEMPERATURE, hard_concrete
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.learning.learner import GateLearner, learner

OPEN = 3.0  # log_a of gates that start open: the evaluation gate is 1 from 2.4 on
DESCENT = 0.6  # share of the updates in which the target share of open gates falls to keep / heads
PROPORTIONAL, INTEGRAL = 0.5, 5.0  # gains of the controller of λ
EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class L0Options:
    """`strength` is λ, by the convention `strength_as`; or `keep` is the number of heads, and λ is searched.

    "paper": loss + λ · Σ over all heads of P(g ≠ 0) (Voita et al. 2019, §5.1). "code": loss + λ · mean over gated
    attention modules of the sum over their heads, as the story-of-heads program's `concrete_coef`. The loss is the
    mean over target tokens, in nats. With M gated modules λ_paper = λ_code / M.
    """

    strength: float | None = option(None, "Price of an open head.", name="lambda", metavar="L", minimum=0, common=True)
    strength_as: Literal["paper", "code"] = option(
        "paper", "λ on the sum over heads of P(open), or (code) on the mean over attention modules.", name="lambda-as"
    )
    keep: int | None = option(
        None, "Heads that stay, of those where heads may go (--sites).", metavar="N", minimum=1, common=True
    )
    start: Literal["glorot", "open"] | None = option(
        None, "Gates at the start: random, about half of them half closed, or open; default: open with --keep."
    )
    temperature: float = option(0.33, "Of the gates' noise.", above=0)

    def __post_init__(self) -> None:
        check_one_given({f"{flag('lambda')} L": self.strength, f"{flag.keep} N to have it searched": self.keep})


@learner
class L0(GateLearner):
    """Learns hard concrete gates under a price λ, which is given or searched for a number of heads (--keep).

    A searched λ follows a proportional-integral controller. Its target is the share of open gates, which falls from its
    initial value to keep / heads within the first 60 % of the updates. With the distance of Σ σ(log_a) / heads from the
    target, λ is 0.5 · distance + the sum of all distances · 5 / updates; it may be negative, which opens gates again.
    At the end the `keep` largest log_a stay, and `facts` has the number that the paper's rule would keep. With a given
    λ that rule decides: log_a > 0.
    """

    name = "l0"
    summary = "Learn hard concrete gates under a price for open ones, from a trained checkpoint (Voita et al. 2019)."
    Options = L0Options
    learnt_facts = ("lambda_paper", "lambda_code", "heads_with_log_a_above_0")

    def __init__(self, gating: GateLayout, options: L0Options, *, updates: int, generator: torch.Generator) -> None:
        self.integral = 0.0
        super().__init__(gating, options, updates=updates, generator=generator)
        self.first_share = self._open_share()
        strength = options.strength or 0.0
        self.strength = strength if options.strength_as == "paper" else strength / len(gating.counts)

    @property
    def start_method(self) -> str:
        """How gates start. Open ones choose better in short runs with a number of heads (benchmarks/pruning)."""
        return self.options.start or ("glorot" if self.options.keep is None else "open")

    def start(self) -> Tensor:
        """The initial log_a [n]: Glorot-uniform, module by module, or open."""
        if self.start_method == "open":
            return torch.full((len(self.gating.units),), OPEN, dtype=torch.float64)
        # U(−√(3/h), √(3/h)) for the h heads of a module; not the program's numbers, whose seed is a variable's name
        sizes = map(len, self.gating.members.values())
        uniform = [torch.rand(size, generator=self.generator, dtype=torch.float64) for size in sizes]
        return torch.cat([(2 * u - 1) * math.sqrt(3 / len(u)) for u in uniform])

    def training_gates(self) -> Tensor:
        u = torch.rand(len(self.weights), generator=self.generator, dtype=torch.float64)
        u = EPSILON + (1 - 2 * EPSILON) * u
        return noisy_gates(self.weights, u, temperature=self.options.temperature)

    def gates(self) -> Tensor:
        return hard_concrete(self.weights.detach())

    def open_probability(self) -> Tensor:
        return nonzero_probability(self.weights.detach(), temperature=self.options.temperature)

    def penalty(self) -> Tensor | None:
        """λ · Σ over heads of P(g ≠ 0), with λ of the paper's convention."""
        if self.strength == 0:
            return None
        p_open = nonzero_probability(self.weights, temperature=self.options.temperature)
        return self.strength * (p_open * self.gating.sizes).sum()

    def after_update(self) -> None:
        """Count the update, and adjust a searched λ."""
        super().after_update()
        if self.units_to_keep is None:
            return
        final_share = self.units_to_keep * float(self.gating.sizes[0]) / self.gating.heads
        remaining = max(0.0, 1 - self.update / (DESCENT * self.updates))
        target = final_share + (self.first_share - final_share) * remaining
        distance = self._open_share() - target
        self.integral += distance
        self.strength = PROPORTIONAL * distance + INTEGRAL * self.integral / self.updates

    def decide(self) -> Tensor:
        """The gates that stay: the `keep` largest, else those with P(g = 1) > P(g = 0), so log_a > 0 (footnote 7)."""
        return self.weights.detach() > 0 if self.units_to_keep is None else super().decide()

    def facts(self) -> dict[str, Any]:
        modules = len(self.gating.counts)
        by_rule = int(self.gating.sizes[self.weights > 0].sum()) + len(self.gating.protected_heads)
        return {
            "lambda_paper": self.strength,
            "lambda_code": self.strength * modules,
            "lambda_searched": self.units_to_keep is not None,
            "gated_modules": modules,
            "temperature": self.options.temperature,
            "start": self.start_method,
            "decision": "log_a > 0" if self.units_to_keep is None else f"the {self.options.keep} largest log_a",
            "heads_with_log_a_above_0": by_rule,
        }

    def signature(self) -> dict[str, str]:
        size = "" if self.options.keep is None else f"(keep {self.options.keep})"
        return {"lambda": f"{self.strength:.4g}{size}"}

    def remarks(self) -> list[str]:
        """Remarks on gates between 0 and 1, which the decision changes, and on ties at the number of heads."""
        gates = self.gates()
        n_undecided = int(((gates > 0) & (gates < 1)).sum())
        remarks = super().remarks()
        if n_undecided:
            settle = f"more {flag.updates} or a higher {flag.gate_lr} settles them"
            remarks.append(f"{n_undecided} of {len(gates)} gates are still between 0 and 1, and were decided; {settle}")
        return remarks

    def trace(self) -> dict[str, float]:
        modules = 1 if self.options.strength_as == "paper" else len(self.gating.counts)
        return {"lambda": self.strength * modules}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "held": self.integral, "strength": self.strength, "first": self.first_share}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.integral, self.strength, self.first_share = (float(state[name]) for name in ("held", "strength", "first"))

    def _open_share(self) -> float:
        """Σ σ(log_a) over gated heads, divided by the number of heads."""
        soft = torch.sigmoid(self.weights.detach()) * self.gating.sizes
        return float(soft.sum()) / self.gating.heads


def noisy_gates(log_a: Tensor, u: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """Gates of one training pass: s = σ((ln u − ln(1 − u) + log_a) / t), stretched to (−0.1, 1.1) and clipped."""
    s = torch.sigmoid((u.log() - (-u).log1p() + log_a) / temperature)
    return (s * (HIGH - LOW) + LOW).clamp(0, 1)


def nonzero_probability(log_a: Tensor, *, temperature: float = TEMPERATURE) -> Tensor:
    """P(g ≠ 0) = σ(log_a − t·ln(0.1 / 1.1)), clipped to [1e-6, 1 − 1e-6]: the penalty of one gate."""
    return torch.sigmoid(log_a - temperature * math.log(-LOW / HIGH)).clamp(EPSILON, 1 - EPSILON)
