"""The contract of a rule set, and the registry. A new rule set is a file of its own in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.heads import Site
from headscope.registry import Registry
from headscope.relevance.readout import Relevance

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint

Target = Literal["top1", "reference", "contrastive"]
Steps = Literal["sum", "each"]
TARGETS: tuple[Target, ...] = ("top1", "reference", "contrastive")
STEPS: tuple[Steps, ...] = ("sum", "each")


@dataclass(frozen=True)
class Explanation:
    """Relevances of every (site, layer) for one batch.

    `counts` [p b] is the number of predictions of sentence b that are explained at p: one or none, or with p = 1 all of
    them together. `values` [p b] are the explained numbers.
    """

    relevance: dict[tuple[Site, int], Relevance]
    counts: Tensor
    values: Tensor


def explained_quantity(checkpoint: Checkpoint, *, has_target: bool, target: Target) -> str:
    """What is explained: the target, of words or classes, or "representation".

    ConfigError where a model has no such target.
    """
    if checkpoint.predicts == "nothing" or (checkpoint.two_sided and not has_target):
        if target != "top1":
            raise ConfigError(
                f"--target-token {target} is about predicted tokens, and there are none here; leave it out: "
                "the mean-pooled final state is explained"
            )
        return "representation"
    if checkpoint.label_names and target == "reference":
        raise ConfigError("--target-token reference: the text says no class; choose top1 or contrastive")
    return target


class RuleSet(ABC):
    """Propagation rules from an output back to every head.

    `linear`: the relevance of a sum is the sum of relevances, so that all positions of a text can be explained in one
    backward pass. `steps`: the default, one pass for their "sum" or for "each".
    """

    name: str
    summary: str
    linear: ClassVar[bool] = True
    steps: ClassVar[Steps] = "sum"

    @abstractmethod
    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        """Why the rule set does not apply to a checkpoint, None where it does."""

    @abstractmethod
    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """Relevances for the target, at each position or for their sum."""


RULE_SETS: Registry[RuleSet] = Registry("rule set", package="headscope.relevance", group="headscope.rule_sets")


def register(rule_set: RuleSet) -> RuleSet:
    """Add a rule set under its name."""
    return RULE_SETS.register(rule_set.name, rule_set, where=type(rule_set).__module__)
