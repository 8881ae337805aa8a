"""Options of the `headscope prune` commands that choose heads: by a ranking, by learnt gates, or by both in a sweep.

Imports no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

from headscope.config.declarations import Declared, read_declarations
from headscope.config.inputs import (
    BleuOption,
    batch_tokens_option,
    data_option,
    model_option,
    output_option,
    search_option,
)
from headscope.config.option import BEAM, RESAMPLES, SEED, WHOLE, option
from headscope.errors import ConfigError, check_one_given, flag, raise_first
from headscope.evaluation.margin import MARGIN, Margin
from headscope.pruning.options.shared import (
    ANCHOR,
    AUTO_DAMPING,
    DAMPING,
    LEARNT_WITH,
    MEASURED_TEXT,
    STAY,
    TEXT,
    Compensation,
    PruningOptions,
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
"""The allocation of heads to layers."""
ALLOCATE = (
    "Heads that layers keep. global: by scores; per-layer: the same share; uniform: the same number, in whole "
    "groups (--export native); per-group: by scores, the same number of every key/value group (--export laguna); "
    "measured: by the loss after refits (slow)."
)
GATE_LR = "Adam's rate for the gates; default: the learner's own (l0 0.1, subset 0.2)."
SEQUENTIAL = "least-squares: refit module after module, so that later ones make up for earlier ones (a pass each)."


@dataclass(frozen=True, kw_only=True)
class RankConfig(SelectionConfig):
    """Options of `headscope prune rank`: the criterion, the number of heads to keep, refits and tuning."""

    by: str = heads_option(
        help="fisher, obs-task, obs, lrp … (`headscope list criteria`); a column of --from; or a CSV file of scores.",
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
        False, "Heads with low values stay; default: as declared for --by, which is printed."
    )
    keep_highest: bool = heads_option(False, "Heads with high values stay.", excludes="keep_lowest")
    steps: int = heads_option(1, "Remove heads in N steps, and score anew before each.", minimum=1)
    allocate: Allocation = heads_option("global", ALLOCATE, common=True)
    compensate: Compensation = compensation_option(
        "none", "Then refit the remaining output projections in closed form, before tuning.", common=True, needs=TEXT
    )
    anchor: tuple[str, ...] = compensation_option(
        (), f"{ANCHOR} --allocate measured refits so too.", metavar="NAME|FILE[,TARGET]", flagless=True
    )
    sequential: bool = compensation_option(False, SEQUENTIAL)
    damping: float | None = heads_option(
        None,
        f"Ridge, a share of second moments; default: {DAMPING:g}, or {AUTO_DAMPING:g} if measured or on short text.",
        minimum=0,
        flagless=True,
    )
    score_sentences: int = data_option(500, "Lines of --source to score on.", minimum=1, needs=TEXT)
    batch_tokens: int | None = batch_tokens_option(needs=MEASURED_TEXT)

    def __post_init__(self) -> None:
        numbers = {f"{flag.keep} N, the heads that stay": self.keep}
        check_one_given(numbers | {f"{flag.keep_fraction} F, the share that stays": self.keep_fraction})
        has_run, steps = self.run is not None, flag("steps", self.steps)
        requirement = f"{flag.allocate} measured takes text and one step: give {flag.source}, no {flag.steps}"
        problems = {
            f"{flag.column} is for {flag.by} FILE.csv": self.column is not None and not self.is_file,
            f"{flag('from')} RUN and {flag.by} FILE.csv both say where scores are; give one of them": has_run
            and self.is_file,
            f"{steps} scores anew, which needs a criterion that can be measured": self.steps > 1
            and (self.is_file or has_run),
            requirement: self.allocate == "measured" and (not self.has_text or self.steps > 1),
        }
        raise_first(ConfigError, problems)

    @property
    def refit(self) -> Refit:
        """The refit of output projections."""
        if self.compensate == "least-squares":
            return Refit.of(self, objective="")
        others: dict[str, Any] = {"anchor": ()} if self.allocate == "measured" else {}
        return Refit.of(self, objective="", damping=None, **others)

    @property
    def end(self) -> End | None:
        """The end of the ranking that the user wants to keep."""
        return "lowest" if self.keep_lowest else "highest" if self.keep_highest else None

    @property
    def is_file(self) -> bool:
        """Whether `by` is a file."""
        return self.by.endswith(".csv") or os.path.isfile(self.by)


LEARNERS: Registry[Any] = Registry(
    "learner", package="headscope.pruning.learning.learners", group="headscope.pruning.learners"
)
"""Learners of gates by name: subclasses of `headscope.pruning.learning.learner.GateLearner`."""


class DeclaredLearner(Declared):
    """The declaration of a learner; `GateLearner` explains the attributes."""

    gate_lr: ClassVar[float] = 0.1


def learners() -> dict[str, type[DeclaredLearner]]:
    """The learners by name, without torch."""
    declarations = read_declarations(DeclaredLearner, LEARNERS)
    return {learner.name: learner for learner in sorted(declarations, key=lambda learner: learner.name)}


def priced_learners() -> list[str]:
    """Names of learners that take a price λ of an open head instead of a number of heads."""
    return [name for name, cls in learners().items() if "strength" in {entry.name for entry in fields(cls.Options)}]


@dataclass(frozen=True, kw_only=True)
class LearnConfig(SelectionConfig):
    """Options of learning gates, and the model along with them; `method` has the options of the learner."""

    method: Any
    batch_tokens: int | None = model_option(
        2048, "Token positions in the batch of an update.", minimum=1, maximum=WHOLE
    )
    updates: int = learning_option(1000, "Updates of learning.", minimum=1, common=True)
    gate_lr: float | None = learning_option(None, GATE_LR, minimum=0)
    log_every: int | None = learning_option(None, "Updates between points of gates.csv; default: 50 points.", minimum=1)
    save_every: int = learning_option(500, "Updates between states for --resume; 0: none.", minimum=0, identity=False)
    resume: bool = output_option(
        False, "Go on with the run in DIR that was killed, exactly.", identity=False, common=True
    )

    def __post_init__(self) -> None:
        if not self.has_text:
            raise ConfigError(missing_text("no text to learn from"))

    def settings(self) -> dict[str, Any]:
        """The options as plain JSON values."""
        values = super().settings()
        values["method"] |= {"name": self.learner.name}
        return values

    @property
    def learner(self) -> Any:
        """The learner class that `method` has the options of."""
        return next(cls for _, cls in LEARNERS if type(self.method) is cls.Options)


measuring_option = partial(option, panel="Measuring")
"""`option` under the heading of that name."""
OF_GATES = ("start", "updates", "gate_lr")
"""Options of learning gates that no ranking has."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BleuOption, PruningOptions):
    """The options of `headscope prune sweep`; those of the same name in `prune rank` and learners are passed on."""

    device_map: str | None = None
    methods: tuple[str, ...] = heads_option(
        ("l0", "subset", "random", "magnitude", "confidence", "gradient", "lrp"),
        "l0, subset or other learners, and prune rank's --by, with :lowest or :highest if it has no direction.",
        common=True,
    )
    keep: tuple[int, ...] = heads_option(
        (), f"Sizes: {STAY[0].lower()}{STAY[1:]}", metavar="N,N,…", minimum=1, common=True
    )
    keep_fraction: tuple[float, ...] = heads_option(
        (), "Sizes: shares of them that stay.", metavar="F,F,…", above=0, maximum=1, common=True
    )
    lambdas: tuple[float, ...] = heads_option(
        (), "l0: these prices of an open head, instead of --keep.", name="lambda", metavar="L,L,…", minimum=0
    )
    strength_as: Literal["paper", "code"] = heads_option(
        "paper",
        "l0: price on the sum over heads, or (code) the mean.",
        name="lambda-as",
        needs="lambdas",
        flagless=True,
    )
    start: Literal["glorot", "open"] | None = heads_option(
        None, "l0: gates at the start, random or open; default: open with --keep, else glorot.", flagless=True
    )
    allocate: Allocation = heads_option("global", ALLOCATE)
    compensate: Compensation = compensation_option(
        "none", "Refit the remaining output projections after a ranking, before any tuning.", common=True
    )
    sequential: bool = compensation_option(False, SEQUENTIAL, flagless=True)
    seeds: int = heads_option(
        3, "Seeds of what is learnt or drawn; other rankings run once.", minimum=1, maximum=1000, common=True
    )
    seed: int = heads_option(1, "The first of them, and that of the bootstrap.", minimum=0, maximum=SEED)
    score_sentences: int = data_option(500, "Lines of --source to rank on.", minimum=1, flagless=True)
    updates: int = learning_option(1000, "Updates of learning.", minimum=1, common=True)
    gate_lr: float | None = learning_option(None, GATE_LR, minimum=0, flagless=True)
    from_scratch: bool = learning_option(
        False, "Also train what learnt gates leave from scratch, as a control.", flagless=True
    )
    recipe: Path | None = learning_option(
        None, "A run or its options; default: CKPT's run.", metavar="RUN|FILE.toml", needs="from_scratch", flagless=True
    )
    metric: str = measuring_option(
        "", "What is measured (`headscope list metrics`); default: what fits the model.", common=True
    )
    functions: Path | None = measuring_option(
        None, "A run of `analyze` of CKPT: count the functions of survivors.", metavar="RUN", identity=False
    )
    relabel: bool = measuring_option(
        False, "Also label the heads of every pruned model, as that run does.", needs="functions", flagless=True
    )
    text: Literal["raw", "tokenised-lowercase"] = measuring_option(
        "raw", "What BLEU compares, as in evaluate.", flagless=True
    )
    beam: int | None = search_option(
        None, "Beam; default: the checkpoint's own.", minimum=1, maximum=BEAM, flagless=True
    )
    hiding: Literal["each", "random"] = measuring_option("each", "Encoders alone: as in evaluate.", flagless=True)
    bootstrap: int = measuring_option(
        1000, "Resamples of intervals and paired tests.", minimum=2, maximum=RESAMPLES, identity=False
    )
    margin: str | None = measuring_option(
        None, "Loss that counts as none: X in the metric's unit, or X %; default: 1 %.", metavar="X|X%", identity=False
    )
    keep_models: bool = output_option(
        False, "Keep the pruned model of every cell, without its heads: column model of sweep.csv.", identity=False
    )
    force: bool = output_option(False, "Begin anew, without the cells that DIR holds.", identity=False, common=True)

    def __post_init__(self) -> None:
        prices = [f"{price:g}" for price in self.lambdas]
        if repeated := [price for price in prices if prices.count(price) > 1]:
            problem = f"{flag('lambda')} {repeated[0]} is there twice"
            raise ConfigError(f"{problem}; runs are named by six digits: give others")
        _ = self.tolerance, self.refit
        ranks = len(self.learnt) < len(self.methods)
        named_learners, all_learners = ", ".join(sorted(self.learnt)), " and ".join(learners())
        with_prices, methods, has_text = priced_learners(), set(self.methods), self.has_text
        groups = f"{named_learners} learns gates of whole groups; sweep it apart"
        needs = f"is for rankings, and needs text: give {flag.source} FILE"
        has_sizes = self.keep or self.keep_fraction or (self.lambdas and methods <= set(with_prices))
        problems: dict[str, object] = {
            f"{flag.allocate} {self.allocate} is for rankings; {flag.methods} names none": self.allocate != "global"
            and not ranks,
            f"{flag.allocate} per-group is for rankings, and {groups}": self.allocate == "per-group" and self.learnt,
            f"{flag.compensate} {self.compensate} {needs}": self.compensate != "none" and not (ranks and has_text),
            f"{flag.allocate} measured {needs}": self.allocate == "measured" and not (ranks and has_text),
            f"{flag('lambda')} is for {flag.methods} {' or '.join(with_prices)}": self.lambdas
            and methods.isdisjoint(with_prices),
            f"no sizes: give {flag.keep} 4,8,16 (heads that stay) or {flag.keep_fraction} 0.25,0.5": not has_sizes,
            f"{flag.from_scratch} trains what {all_learners} leave; {flag.methods} names none": self.from_scratch
            and not named_learners,
        }
        for name in self.unused_options:
            advice = f"is about learning, and nothing learns; give {flag.tune_updates} N too, or name {all_learners} in"
            reason = f"is about gates of {all_learners}; name one in" if name in OF_GATES else advice
            problems[f"{flag(name)} {reason} {flag.methods}"] = getattr(self, name) != getattr(type(self), name)
        problems[missing_text("no text to learn from")] = self.trains and not has_text
        nothing = f"no text to measure on: give {flag.valid_source} FILE, or {flag.source} FILE"
        problems[nothing] = not has_text and self.valid_text is None
        raise_first(ConfigError, problems)

    @property
    def refit(self) -> Refit:
        """The refit of output projections after a ranking has removed heads."""
        return Refit(method=self.compensate, sequential=self.sequential)

    @property
    def allocation(self) -> Allocation:
        """The allocation by scores; "global" for a measured one, whose scores already decide what each layer keeps."""
        return "global" if self.allocate == "measured" else self.allocate

    @property
    def tolerance(self) -> Margin:
        """The margin of non-inferiority verdicts."""
        return Margin.parse(MARGIN if self.margin is None else self.margin)

    @property
    def trains(self) -> bool:
        """Whether any cell changes weights."""
        return bool(self.tune_updates or self.learnt)

    @property
    def unused_options(self) -> list[str]:
        """Names of options without meaning for these methods; cells of other methods in the folder may use them."""
        return [*(OF_GATES if not self.learnt else ()), *(LEARNT_WITH if not self.trains else ())]

    @property
    def learnt(self) -> set[str]:
        """The methods that learn gates."""
        return set(self.methods) & set(learners())

    def for_cell(self, folder: Path, seed: int | None, *, force: bool = True) -> dict[str, Any]:
        """The options of the run of a cell that a config of a learner or of `prune rank` shares with this one."""
        shared = {field.name: getattr(self, field.name) for field in fields(PruningOptions)}
        return {**shared, "out": folder, "seed": seed, "force": force}
