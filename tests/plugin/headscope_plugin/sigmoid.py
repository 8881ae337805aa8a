"""A learner: plain sigmoid gates, of which the largest stay."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.config import option
from headscope.pruning.learning.learner import GateLearner, learner


@dataclass(frozen=True, kw_only=True)
class SigmoidOptions:
    """How many heads stay, and how fast gates close."""

    keep: int = option(help="Heads that stay, of those sites.", metavar="K")
    steepness: float = option(1.0, "Of the sigmoid.", minimum=0.01)


@learner
class Sigmoid(GateLearner):
    """Gates σ(steepness · w), w = 0 at the start; at the end the K largest w stay."""

    name = "sigmoid"
    summary = "Learn sigmoid gates."
    Options = SigmoidOptions
    gate_lr = 0.05

    def start(self) -> Tensor:
        return torch.zeros(len(self.gating.units), dtype=torch.float64)

    def training_gates(self) -> Tensor:
        return torch.sigmoid(self.options.steepness * self.weights)

    def gates(self) -> Tensor:
        return self.training_gates().detach()

    def open_probability(self) -> Tensor:
        return self.gates()
