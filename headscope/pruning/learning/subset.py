"""Differentiable subset pruning: exactly K heads (Li, Cotterell & Sachan 2021).

Deviation: gates of training are an exact relaxation within [0, 1] (`soft_top_k`), where the paper's sum of softmaxes
may exceed 1, and Gumbel noise is added to the importances as there.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headscope.pruning.learning.gate_layout import GateLayout
from headscope.pruning.learning.learner import GateLearner
from headscope.pruning.learning.topk import annealed, gumbel, soft_top_k, straight_through, top_k
from headscope.pruning.options.learn import SubsetOptions


class Subset(GateLearner):
    """One importance for every unit of the whole model; heads compete for K places.

    The start is Xavier's for a matrix of modules × units of a module. At the end the K largest stay.
    """

    method = "subset"

    def __init__(self, gating: GateLayout, options: SubsetOptions, *, updates: int, generator: torch.Generator) -> None:
        self.options = options
        self.k = gating.kept_units(options.keep)
        super().__init__(gating, updates=updates, generator=generator)

    def start(self) -> Tensor:
        modules = len(set(self.gating.modules))
        widest = max(self.gating.modules.count(module) for module in set(self.gating.modules))
        bound = math.sqrt(6 / (modules + widest))
        return (2 * torch.rand(len(self.gating.units), generator=self.generator, dtype=torch.float64) - 1) * bound

    @property
    def temperature(self) -> float:
        """Of the next update."""
        options = self.options
        return annealed(self.update, first=options.first, last=options.last, updates=self.cooldown)

    @property
    def cooldown(self) -> int:
        """Updates until the temperature has fallen."""
        return max(round(self.updates * 2 / 3), 1) if self.options.cooldown is None else self.options.cooldown

    def training_gates(self) -> Tensor:
        if self.options.straight_through:
            return straight_through(self.weights, self.k)
        noisy = self.weights + gumbel(len(self.weights), self.generator)
        return soft_top_k(noisy, self.k, temperature=self.temperature)

    def gates(self) -> Tensor:
        return self.decide().double()

    def open_probability(self) -> Tensor:
        """Not a probability proper: the soft top-K without noise at this temperature."""
        if self.options.straight_through:
            return self.gates()
        return soft_top_k(self.weights.detach(), self.k, temperature=self.temperature)

    def decide(self) -> Tensor:
        return top_k(self.weights.detach(), self.k)

    def facts(self) -> dict[str, Any]:
        options = self.options
        if options.straight_through:
            return {"straight_through": True, "decision": f"the {options.keep} largest importances"}
        return {
            "straight_through": False,
            "temperature": [options.first, options.last],
            "cooldown": self.cooldown,
            "decision": f"the {options.keep} largest importances",
        }

    def remarks(self) -> list[str]:
        """Importances that tie at the border."""
        return self.ties(self.k)

    def trace(self) -> dict[str, float]:
        return {"temperature": self.temperature}
