"""The options of `headscope prune` for all that learns gates, and which learners there are. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from headscope.config.declarations import Declared, declared
from headscope.config.inputs import model_option, output_option
from headscope.config.option import WHOLE
from headscope.errors import ConfigError
from headscope.pruning.options.shared import GATE_LR, SelectionConfig, learning_option
from headscope.registry import Registry

LEARNERS: Registry[Any] = Registry(
    "learner", package="headscope.pruning.learning.learners", group="headscope.pruning.learners"
)
"""What learns gates, by name: classes made from `headscope.pruning.learning.learner.GateLearner`."""


@dataclass(frozen=True)
class DeclaredLearner(Declared):
    """What a learner declares: attributes of its class, which `GateLearner` explains."""

    gate_lr: float = 0.1

    @property
    def priced(self) -> bool:
        """Whether an open head may have a price, λ, instead of a number of heads that stay."""
        return "strength" in {entry.name for entry in fields(self.Options)}


def learners() -> dict[str, DeclaredLearner]:
    """The learners by name, without torch."""
    declarations = declared(DeclaredLearner, LEARNERS)
    return {learner.name: learner for learner in sorted(declarations, key=lambda learner: learner.name)}


def check_prices(strengths: Sequence[float]) -> None:
    """ConfigError for a λ that is there twice: runs are named by six digits of it."""
    names = [f"{strength:g}" for strength in strengths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"--lambda {twice[0]} is there twice; runs are named by six digits: give others")


@dataclass(frozen=True, kw_only=True)
class LearnConfig(SelectionConfig):
    """How gates are learnt, and how the model learns with them; `method` has the options of their learner."""

    method: Any
    batch_tokens: int | None = model_option(
        2048, "Token positions in the batch of an update.", minimum=1, maximum=WHOLE
    )
    updates: int = learning_option(1000, "Updates of learning.", minimum=1, common=True)
    gate_lr: float | None = learning_option(None, GATE_LR, minimum=0)
    log_every: int | None = learning_option(None, "Updates between points of gates.csv; default: 50 points.", minimum=1)
    save_every: int = learning_option(
        500, "Updates between states that --resume goes on from; 0: none.", minimum=0, identity=False
    )
    resume: bool = output_option(
        False, "Go on with the run in DIR that was killed, exactly.", identity=False, common=True
    )

    def __post_init__(self) -> None:
        if not self.has_text:
            raise ConfigError("no text to learn from: give --source FILE, and --target FILE for translation")

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = super().settings()
        values["method"] = vars(self.method) | {"name": self.learner.name}
        return values

    @property
    def learner(self) -> Any:
        """The learner whose options `method` has."""
        return next(cls for _, cls in LEARNERS if type(self.method) is cls.Options)
