"""The options of `headscope prune` for all that chooses heads, by a ranking or by learnt gates. Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Literal

from headscope.config.declarations import Declared, read_declarations
from headscope.config.inputs import batch_tokens_option, data_option, model_option, output_option
from headscope.config.option import WHOLE
from headscope.errors import ConfigError, check_one_given, flag, raise_first
from headscope.pruning.options.shared import (
    ANCHOR,
    AUTO_DAMPING,
    DAMPING,
    GATE_LR,
    MEASURED_TEXT,
    STAY,
    TEXT,
    Refit,
    SelectionConfig,
    compensation_option,
    heads_option,
    learning_option,
    missing_text,
)
from headscope.registry import Registry

End = Literal["lowest", "highest"]
"""Which end of a ranking stays."""
Allocation = Literal["global", "per-layer", "uniform", "per-group", "measured"]
"""How many heads each layer keeps."""
ALLOCATE = (
    "Heads that layers keep. global: as scores say; per-layer: the same share; uniform: the same number, in whole "
    "groups (--export native); per-group: as scores say, as many of every key/value group (--export laguna); "
    "measured: as the loss says after refits (slow)."
)
SEQUENTIAL = "least-squares: refit module after module, so that later ones make up for earlier ones (a pass each)."


@dataclass(frozen=True, kw_only=True)
class RankConfig(SelectionConfig):
    """What heads are ranked by, how many stay, and what follows."""

    by: str = heads_option(
        help="fisher, obs-task, obs, lrp, magnitude or others (`headscope list criteria`); with --from a column "
        "of its heads.csv; or a CSV file of site,layer,head and scores.",
        metavar="NAME|FILE.csv",
    )
    keep: int | None = heads_option(None, STAY, minimum=1, common=True)
    keep_fraction: float | None = heads_option(
        None, "Share of the heads that stays.", metavar="F", above=0, maximum=1, common=True
    )
    run: Path | None = heads_option(
        None, "Read heads.csv of this run instead of measuring.", name="from", metavar="RUN", common=True
    )
    column: str | None = heads_option(None, "Column of --by FILE.csv.", flagless=True)
    keep_lowest: bool = heads_option(
        False, "Heads with low values stay; default: as is agreed for --by, which is printed."
    )
    keep_highest: bool = heads_option(False, "Heads with high values stay.", excludes="keep_lowest")
    steps: int = heads_option(1, "Take heads out in N steps, and score anew before each.", minimum=1)
    allocate: Allocation = heads_option("global", ALLOCATE, common=True)
    compensate: Literal["none", "mean", "least-squares"] = compensation_option(
        "none",
        "Then refit what is left of the output projections on the text that heads were scored on, before any tuning, "
        "in closed form.",
        common=True,
        of=TEXT,
    )
    anchor: tuple[str, ...] = compensation_option(
        (),
        f"{ANCHOR} --allocate measured refits so too.",
        metavar="NAME|FILE[,TARGET]",
        flagless=True,
    )
    sequential: bool = compensation_option(False, SEQUENTIAL)
    damping: float | None = heads_option(
        None,
        f"Ridge of criteria and allocations that refit, a share of the mean second moment; default: {DAMPING:g}, or "
        f"{AUTO_DAMPING:g} of what is measured, and of refits on short texts.",
        minimum=0,
        flagless=True,
    )
    score_sentences: int = data_option(500, "Lines of --source to score on.", minimum=1, of=TEXT)
    batch_tokens: int | None = batch_tokens_option(of=MEASURED_TEXT)

    def __post_init__(self) -> None:
        numbers = {f"{flag.keep} N, the heads that stay": self.keep}
        check_one_given(numbers | {f"{flag.keep_fraction} F, the share that stays": self.keep_fraction})
        has_run, steps = self.run is not None, flag("steps", self.steps)
        needed = f"{flag.allocate} measured takes text and one step: give {flag.source}, no {flag.steps}"
        problems = {
            f"{flag.column} is for {flag.by} FILE.csv": self.column is not None and not self.is_file,
            f"{flag('from')} RUN and {flag.by} FILE.csv both say where scores are; give one of them": has_run
            and self.is_file,
            f"{steps} scores anew, which needs a criterion that can be measured": self.steps > 1
            and (self.is_file or has_run),
            needed: self.measures and (not self.has_text or self.steps > 1),
        }
        raise_first(ConfigError, problems)

    @property
    def refit(self) -> Refit:
        """How output projections are refitted."""
        if self.compensate == "least-squares":
            return Refit.of(self, objective="")
        return Refit.of(self, objective="", damping=None, **({"anchor": ""} if self.measures else {}))

    @property
    def measures(self) -> bool:
        """Whether heads are chosen by what is measured once the others are refitted."""
        return self.allocate == "measured"

    @property
    def end(self) -> End | None:
        """Which end the user wants to stay."""
        return "lowest" if self.keep_lowest else "highest" if self.keep_highest else None

    @property
    def is_file(self) -> bool:
        """Whether `by` is a file."""
        return self.by.endswith(".csv") or os.path.isfile(self.by)


LEARNERS: Registry[Any] = Registry(
    "learner", package="headscope.pruning.learning.learners", group="headscope.pruning.learners"
)
"""What learns gates, by name: classes made from `headscope.pruning.learning.learner.GateLearner`."""


class DeclaredLearner(Declared):
    """What a learner declares; `GateLearner` says what the attributes mean."""

    gate_lr: ClassVar[float] = 0.1


def learners() -> dict[str, type[DeclaredLearner]]:
    """The learners by name, without torch."""
    declarations = read_declarations(DeclaredLearner, LEARNERS)
    return {learner.name: learner for learner in sorted(declarations, key=lambda learner: learner.name)}


def priced_learners() -> list[str]:
    """Those for which an open head may have a price, λ, instead of a number of heads that stay."""
    return [name for name, cls in learners().items() if "strength" in {entry.name for entry in fields(cls.Options)}]


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
            raise ConfigError(missing_text("no text to learn from"))

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = super().settings()
        values["method"] = vars(self.method) | {"name": self.learner.name}
        return values

    @property
    def learner(self) -> Any:
        """The learner whose options `method` has."""
        return next(cls for _, cls in LEARNERS if type(self.method) is cls.Options)
