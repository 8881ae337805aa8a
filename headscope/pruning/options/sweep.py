"""The options of `headscope prune sweep`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from headscope.config.inputs import DATA, OUTPUT, SEARCH, BleuOption
from headscope.config.option import BEAM, RESAMPLES, SEED, flag, option
from headscope.errors import ConfigError
from headscope.evaluation.margin import MARGIN, Margin
from headscope.pruning.options.learn import check_prices, learners
from headscope.pruning.options.rank import ALLOCATE, SEQUENTIAL, Allocation
from headscope.pruning.options.refit import Refit, RefitOptions
from headscope.pruning.options.shared import (
    COMPENSATION,
    GATE_LR,
    HEADS,
    LEARNING,
    LEARNT_WITH,
    STAY,
    PruningOptions,
)

MEASURING = "Measuring"
OF_GATES = ("start", "updates", "gate_lr")
"""The options that are about gates alone."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BleuOption, PruningOptions):
    """The options of `headscope prune sweep`; those that it shares with `prune rank` and with learners are theirs."""

    device_map: str | None = None
    methods: tuple[str, ...] = option(
        ("l0", "subset", "random", "magnitude", "confidence", "gradient", "lrp"),
        "l0, subset or another learner, and what prune rank --by has, where it must be said with :lowest or :highest "
        "for the heads that stay.",
        metavar="LIST",
        panel=HEADS,
        common=True,
    )
    keep: tuple[int, ...] = option(
        (), f"Sizes: {STAY[0].lower()}{STAY[1:]}", metavar="N,N,…", panel=HEADS, minimum=1, common=True
    )
    keep_fraction: tuple[float, ...] = option(
        (), "Sizes: shares of them that stay.", metavar="F,F,…", panel=HEADS, above=0, maximum=1, common=True
    )
    lambdas: tuple[float, ...] = option(
        (),
        "l0: these prices of an open head, instead of searching for --keep.",
        name="lambda",
        metavar="L,L,…",
        panel=HEADS,
        minimum=0,
    )
    strength_as: Literal["paper", "code"] = option(
        "paper",
        "l0: λ is a price on the sum over heads, or (code) on the mean over attention modules of it.",
        name="lambda-as",
        panel=HEADS,
        of="lambdas",
        flagless=True,
    )
    start: Literal["glorot", "open"] | None = option(
        None,
        "l0: gates at the start, random or open; default: open with --keep, else glorot.",
        panel=HEADS,
        flagless=True,
    )
    allocate: Allocation = option("global", ALLOCATE, panel=HEADS)
    compensate: Literal["none", "mean", "least-squares"] = option(
        "none",
        "Where a ranking took heads out, refit what is left of the output projections on the text that heads were "
        "scored on, before any tuning, in closed form.",
        panel=COMPENSATION,
        common=True,
    )
    sequential: bool = option(False, SEQUENTIAL, panel=COMPENSATION, flagless=True)
    seeds: int = option(
        3,
        "Seeds of what is learnt or drawn; other rankings run once.",
        panel=HEADS,
        minimum=1,
        maximum=1000,
        common=True,
    )
    seed: int = option(1, "The first of them, and that of the bootstrap.", panel=HEADS, minimum=0, maximum=SEED)
    score_sentences: int = option(500, "Lines of --source to rank on.", panel=DATA, minimum=1, flagless=True)
    updates: int = option(1000, "Updates of learning.", panel=LEARNING, minimum=1, common=True)
    gate_lr: float | None = option(None, GATE_LR, panel=LEARNING, minimum=0, flagless=True)
    from_scratch: bool = option(
        False, "Also train what learnt gates leave from scratch, as a control.", panel=LEARNING, flagless=True
    )
    recipe: Path | None = option(
        None,
        "How: a run of `headscope train` or a file of its options; default: the run CKPT lies in.",
        metavar="RUN|FILE.toml",
        panel=LEARNING,
        of="from_scratch",
        flagless=True,
    )
    metric: str = option(
        "", "`headscope list metrics`; default: what fits the model.", metavar="NAME", panel=MEASURING, common=True
    )
    functions: Path | None = option(
        None,
        "A run of `analyze` of CKPT: count the functions of survivors.",
        metavar="RUN",
        panel=MEASURING,
        identity=False,
    )
    relabel: bool = option(
        False,
        "Also label the heads of every pruned model anew, on the text and with the options of that run.",
        panel=MEASURING,
        of="functions",
        flagless=True,
    )
    text: Literal["raw", "tokenised-lowercase"] = option(
        "raw", "What BLEU compares, as in evaluate.", panel=MEASURING, flagless=True
    )
    beam: int | None = option(
        None, "Beam; default: the checkpoint's own.", panel=SEARCH, minimum=1, maximum=BEAM, flagless=True
    )
    hiding: Literal["each", "random"] = option(
        "each", "Encoders alone: as in evaluate.", panel=MEASURING, flagless=True
    )
    bootstrap: int = option(
        1000, "Resamples of intervals and paired tests.", panel=MEASURING, minimum=2, maximum=RESAMPLES, identity=False
    )
    margin: str | None = option(
        None,
        "Loss against the unpruned model that counts as none: in the metric's unit, or a percentage of its value; "
        "default: 1%.",
        metavar="X|X%",
        panel=MEASURING,
        identity=False,
    )
    keep_models: bool = option(
        False,
        "Keep the pruned model of every cell, without the heads that went: column model of sweep.csv.",
        panel=OUTPUT,
        identity=False,
    )
    force: bool = option(
        False, "Begin anew, without the cells that DIR holds.", panel=OUTPUT, identity=False, common=True
    )

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError(
                f"--methods is empty; name some of {', '.join(learners())} and the criteria of `prune rank`"
            )
        for name in ("methods", "keep", "keep_fraction"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ConfigError(f"--{name} holds the same entry twice")
        check_prices(self.lambdas)
        _ = self.tolerance, self.refit
        ranks = len(self.learnt) < len(self.methods)
        if self.allocate != "global" and not ranks:
            raise ConfigError(f"--allocate {self.allocate} is for rankings; --methods names none")
        if self.allocate == "per-group" and self.learnt:
            learnt = ", ".join(sorted(self.learnt))
            raise ConfigError(
                f"--allocate per-group is for rankings, and {learnt} learns gates of whole groups; sweep it apart"
            )
        for name, value, needs_text in (
            ("--compensate", self.compensate, self.compensate != "none"),
            ("--allocate", self.allocate, self.allocate == "measured"),
        ):
            if needs_text and not (ranks and self.has_text):
                raise ConfigError(f"{name} {value} is for rankings, and needs text: give --source FILE")
        self._check_sizes()
        if self.trains and not self.has_text:
            raise ConfigError("no text to learn from: give --source FILE, and --target FILE for translation")
        if not self.has_text and self.valid_text is None:
            raise ConfigError("no text to measure on: give --valid-source FILE, or --source FILE")

    @property
    def refit(self) -> RefitOptions:
        """How output projections are refitted where a ranking took heads out."""
        return Refit(method=self.compensate, sequential=self.sequential).options()

    @property
    def allocation(self) -> Allocation:
        """How scores are ranked: those that were measured say themselves how many heads a layer keeps."""
        return "global" if self.allocate == "measured" else self.allocate

    @property
    def tolerance(self) -> Margin:
        """The margin of verdicts."""
        return Margin.parse(MARGIN if self.margin is None else self.margin)

    def _check_sizes(self) -> None:
        if self.lambdas and not self.priced:
            priced = [name for name, learner in learners().items() if learner.priced]
            raise ConfigError(f"--lambda is for {' and '.join(priced)}, which --methods does not name")
        if not (self.keep or self.keep_fraction) and not (self.lambdas and set(self.methods) <= self.priced):
            raise ConfigError("no sizes: give --keep 4,8,16 (heads that stay) or --keep-fraction 0.25,0.5")
        known = " and ".join(learners())
        if self.from_scratch and not self.learnt:
            raise ConfigError(f"--from-scratch trains what {known} leave; --methods names none")
        for name in self.unused:
            if getattr(self, name) != getattr(type(self), name):
                if name in OF_GATES:
                    raise ConfigError(f"{flag(name)} is about gates that {known} learn; --methods names none")
                raise ConfigError(
                    f"{flag(name)} is about learning, and nothing learns; give --tune-updates N too, or name {known} "
                    "in --methods"
                )

    @property
    def trains(self) -> bool:
        """Whether any cell changes weights."""
        return bool(self.tune_updates or self.learnt)

    @property
    def unused(self) -> list[str]:
        """The options that mean nothing for these methods; other cells of a directory may have them."""
        return [*(OF_GATES if not self.learnt else ()), *(LEARNT_WITH if not self.trains else ())]

    @property
    def learnt(self) -> set[str]:
        """The methods that learn gates."""
        return set(self.methods) & set(learners())

    @property
    def priced(self) -> set[str]:
        """Those of them that may have prices of an open head."""
        return {name for name in self.learnt if learners()[name].priced}

    def for_cell(self, folder: Path, seed: int, *, force: bool = True) -> dict[str, Any]:
        """The options that a config of a learner or of `prune rank` shares with this one, for the run of a cell."""
        shared = {field.name: getattr(self, field.name) for field in fields(PruningOptions)}
        return {**shared, "out": folder, "seed": seed, "force": force}
