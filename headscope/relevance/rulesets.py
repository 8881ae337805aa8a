"""Named rule sets. A new one is a registration here or in a file of its own in this folder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from torch import Tensor

from headscope.data import Batch
from headscope.heads import Site
from headscope.registry import Registry
from headscope.relevance.readout import Relevance
from headscope.relevance.rules import Rules

if TYPE_CHECKING:
    from headscope.formats.base import Checkpoint

Where = tuple[Site, int]
Target = Literal["top1", "reference", "contrastive"]
Steps = Literal["sum", "each"]
TARGETS: tuple[Target, ...] = ("top1", "reference", "contrastive")
STEPS: tuple[Steps, ...] = ("sum", "each")


@dataclass(frozen=True)
class Explanation:
    """Relevances of every (site, layer) for one batch.

    `counts` [p b] says how many predictions of sentence b are explained at p: one or none, or with p = 1 all of
    them together. `values` [p b] are the numbers that were explained.
    """

    relevance: dict[Where, Relevance]
    counts: Tensor
    values: Tensor


class RuleSet(ABC):
    """A way to hand relevance back from an output to every head.

    `linear` says that the relevance of a sum is the sum of relevances, so that all positions of a text can be
    explained in one backward pass; `steps` which of "sum" and "each" it is used with unasked.
    """

    name: str
    summary: str
    linear: ClassVar[bool] = True
    steps: ClassVar[Steps] = "sum"

    @abstractmethod
    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        """Why a checkpoint is none that this rule set is for, None where it is one."""

    @abstractmethod
    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """Relevances of what `target` says, at each position or at all together."""


RULE_SETS: Registry[RuleSet] = Registry("rule set", package="headscope.relevance", group="headscope.rule_sets")


def register(rule_set: RuleSet) -> RuleSet:
    """Add a rule set under its name."""
    return RULE_SETS.register(rule_set.name, rule_set, where=type(rule_set).__module__)


@dataclass(frozen=True)
class Backward(RuleSet):
    """Rules for a backward pass through the model as it is; several of them share one forward pass.

    Values are explained, not indicators: relevance at the output is the logit itself.
    """

    name: str
    summary: str
    rules: Rules = field(default_factory=Rules)

    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:  # noqa: D102
        return None

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:  # noqa: D102
        from headscope.relevance.explain import explain_backward

        return explain_backward(checkpoint, batch, [self], target=target, steps=steps)[self.name]


register(Backward("gradient", "gradient x input: the ordinary gradient (Michel et al. 2019 without absolute values)"))
register(
    Backward(
        "cp",
        "conservative propagation: attention weights and norm deviations are constants (Ali et al. 2022); half to "
        "each factor of a gated feed-forward layer",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.0),
    )
)
register(
    Backward(
        "attnlrp",
        "AttnLRP: half to values, half through the softmax to queries and keys (Achtibat et al. 2024)",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.5, values=0.5, scores=0.5),
    )
)
register(
    Backward(
        "epsilon",
        "as cp, with the epsilon rule at linear maps and weights x values (Bach et al. 2015; epsilon 0.25 rms)",
        Rules(activation="identity", norm="constant", product=0.5, weights=0.0, epsilon=0.25),
    )
)
