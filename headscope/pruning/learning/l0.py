"""Hard concrete gates with a penalty on open ones: Voita et al. 2019, §5.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headscope.pruning.learning.gate_layout import GateLayout
from headscope.pruning.learning.hard_concrete import (
    decided,
    initial_log_a,
    noise,
    noisy_gates,
    nonzero_probability,
    settled_gates,
)
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.learning.topk import top_k
from headscope.pruning.options.learn import L0Options

OPEN = 3.0  # log_a of gates that start open: the evaluation gate is 1 from 2.4 on
DESCENT = 0.6  # share of the updates in which the searched number of heads falls to what is wanted
PROPORTIONAL, INTEGRAL = 0.5, 5.0


class L0(GateLearner):
    """log_a for every unit, and λ.

    Where λ is searched, the wanted share of open gates falls from where it starts to keep / heads within the first
    60 % of the updates, and λ follows the distance of Σ σ(log_a) / heads from it: 0.5 · distance + the sum of earlier
    distances · 5 / updates (a controller with a proportional and an integral part; it may go below 0, which opens
    gates again). At the end the `keep` largest log_a stay; `facts` tells how many the rule of the paper would keep.
    Elsewhere that rule decides: log_a > 0.
    """

    method = "l0"

    def __init__(self, gating: GateLayout, options: L0Options, *, updates: int, generator: torch.Generator) -> None:
        self.options = options
        self.units_to_keep = None if options.keep is None else gating.kept_units(options.keep)
        self.integral = 0.0
        super().__init__(gating, updates=updates, generator=generator)
        self.first = self._share()
        self.strength = self._given()

    def start(self) -> Tensor:
        """Glorot's, module by module, or open."""
        if self.options.start == "open":
            return torch.full((len(self.gating.units),), OPEN, dtype=torch.float64)
        modules = list(dict.fromkeys(self.gating.modules))
        counts = [self.gating.modules.count(module) for module in modules]
        return torch.cat([initial_log_a(count, self.generator) for count in counts])

    def training_gates(self) -> Tensor:
        u = noise((len(self.weights),), self.generator)
        return noisy_gates(self.weights, u, temperature=self.options.temperature)

    def gates(self) -> Tensor:
        return settled_gates(self.weights.detach())

    def open_probability(self) -> Tensor:
        return nonzero_probability(self.weights.detach(), temperature=self.options.temperature)

    def penalty(self) -> Tensor | None:
        """λ · Σ over heads of P(g ≠ 0), with λ of the paper's convention."""
        if self.strength == 0:
            return None
        opened = nonzero_probability(self.weights, temperature=self.options.temperature)
        return self.strength * (opened * self.gating.sizes).sum()

    def updated(self) -> None:
        """Also: a searched λ moves."""
        super().updated()
        if self.units_to_keep is None:
            return
        goal = self.units_to_keep * self._size() / self.gating.heads
        remaining = max(0.0, 1 - self.update / (DESCENT * self.updates))
        distance = self._share() - (goal + (self.first - goal) * remaining)
        self.integral += distance
        self.strength = PROPORTIONAL * distance + INTEGRAL * self.integral / self.updates

    def decide(self) -> Tensor:
        weights = self.weights.detach()
        return decided(weights) if self.units_to_keep is None else top_k(weights, self.units_to_keep)

    def facts(self) -> dict[str, Any]:
        modules = self._modules()
        by_rule = int((decided(self.weights.detach()) * self.gating.sizes).sum()) + len(self.gating.protected)
        return {
            "lambda_paper": self.strength,
            "lambda_code": self.strength * modules,
            "lambda_searched": self.units_to_keep is not None,
            "gated_modules": modules,
            "temperature": self.options.temperature,
            "start": self.options.start,
            "decision": "log_a > 0" if self.units_to_keep is None else f"the {self.options.keep} largest log_a",
            "heads_with_log_a_above_0": by_rule,
        }

    def remarks(self) -> list[str]:
        """Gates that have not settled: the decision is then not what was learnt with; and ties at a wanted number."""
        gates = self.gates()
        between = int(((gates > 0) & (gates < 1)).sum())
        tied = [] if self.units_to_keep is None else self.ties(self.units_to_keep)
        if not between:
            return tied
        return [
            *tied,
            f"{between} of {len(gates)} gates are still between 0 and 1, and were decided all the same; "
            "more --updates or a higher --gate-lr settles them",
        ]

    def trace(self) -> dict[str, float]:
        return {"lambda": self.strength if self.options.strength_as == "paper" else self.strength * self._modules()}

    def state(self) -> dict[str, Any]:
        return {**super().state(), "held": self.integral, "strength": self.strength, "first": self.first}

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self.integral, self.strength, self.first = (float(state[name]) for name in ("held", "strength", "first"))

    def _modules(self) -> int:
        return len(self.gating.counts)

    def _size(self) -> float:
        return float(self.gating.sizes[0])

    def _given(self) -> float:
        strength = self.options.strength or 0.0
        return strength if self.options.strength_as == "paper" else strength / self._modules()

    def _share(self) -> float:
        """Σ σ(log_a) over heads, as a share of all of them."""
        soft = torch.sigmoid(self.weights.detach()) * self.gating.sizes
        return float(soft.sum()) / self.gating.heads
