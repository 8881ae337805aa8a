"""The contract of a learner of gates: gates [n] for every batch, and a decision at the end.

`--help` reads name, summary, docstring, Options and gate_lr from the file of a learner without importing it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.pruning.gate_layout import GateLayout, tie_remarks, tied_at, top_k
from headscope.pruning.options.choice import LEARNERS, DeclaredLearner


class GateLearner(DeclaredLearner, ABC):
    """Learns gates, on the CPU in float64, because there are few of them.

    `weights` [n] are the parameters, one for each unit of `gating`; `units_to_keep` units stay (None: any number).
    `updates` is the length of training, `generator` draws noise. Each forward pass in training uses `training_gates`,
    evaluation uses `gates`.

    `headscope prune NAME` has the options of `Options`, a frozen dataclass with a field `keep`, the heads that stay;
    with a field `strength` it may get a price of an open head instead (`--lambda`). `gate_lr` is Adam's default rate
    for the gates; `learnt_facts` names the facts that a sweep records.
    """

    learnt_facts: ClassVar[tuple[str, ...]] = ()

    def __init__(self, gating: GateLayout, options: Any, *, updates: int, generator: torch.Generator) -> None:
        self.gating, self.options, self.updates, self.generator = gating, options, updates, generator
        self.units_to_keep = None if options.keep is None else gating.kept_units(options.keep)
        self.update = 0
        self.weights = nn.Parameter(self.start())

    @abstractmethod
    def start(self) -> Tensor:
        """The initial `weights` [n]."""

    @abstractmethod
    def training_gates(self) -> Tensor:
        """Gates [n] of a forward pass in training, differentiable with respect to `weights`."""

    @abstractmethod
    def gates(self) -> Tensor:
        """Gates [n] without noise, without gradient."""

    @abstractmethod
    def open_probability(self) -> Tensor:
        """The probability of every gate to be open in training [n], without gradient."""

    def decide(self) -> Tensor:
        """The final decision on units [n]: the largest weights stay."""
        assert self.units_to_keep is not None
        return top_k(self.weights, self.units_to_keep)

    def penalty(self) -> Tensor | None:
        """The penalty to add to the mean loss of a target token, if any."""
        return None

    def after_update(self) -> None:
        """Count an update; called after each."""
        self.update += 1

    def facts(self) -> dict[str, Any]:
        """Facts about the result and the decision, for the record."""
        return {}

    def signature(self) -> dict[str, str]:
        """The options that signatures name."""
        return {"keep": str(self.options.keep)}

    def remarks(self) -> list[str]:
        """Remarks on the decision: weights that tie at the border."""
        if self.units_to_keep is None:
            return []
        return tie_remarks(self.gating, tied_at(self.weights, self.units_to_keep))

    def trace(self) -> dict[str, float]:
        """The learner's columns of gates.csv; always the same names."""
        return {}

    def state(self) -> dict[str, Any]:
        """The state beside `weights` that a resumed run needs."""
        return {"update": self.update}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from a `state`."""
        self.update = int(state["update"])


L = TypeVar("L", bound=type[GateLearner])


def learner(cls: L) -> L:
    """Register a `GateLearner` class under its `name`; ConfigError where it has no options of its own."""
    if "Options" not in vars(cls) or "keep" not in {entry.name for entry in fields(cls.Options)}:
        raise ConfigError(f"the learner {cls.name!r} needs Options of its own, a dataclass with a field `keep`")
    LEARNERS.register(cls.name, cls, where=cls.__module__)
    return cls
