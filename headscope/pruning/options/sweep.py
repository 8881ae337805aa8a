"""The options of `headscope prune sweep`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headscope.config.inputs import BleuOption, data_option, output_option, search_option
from headscope.config.option import BEAM, RESAMPLES, SEED, option
from headscope.errors import ConfigError, flag, raise_first
from headscope.evaluation.margin import MARGIN, Margin
from headscope.pruning.options.choice import ALLOCATE, SEQUENTIAL, Allocation, learners, priced_learners
from headscope.pruning.options.shared import (
    GATE_LR,
    LEARNT_WITH,
    STAY,
    PruningOptions,
    Refit,
    compensation_option,
    heads_option,
    learning_option,
    missing_text,
)

measuring_option = partial(option, panel="Measuring")
"""`option` under that heading."""
OF_GATES = ("start", "updates", "gate_lr")
"""The options that are about gates alone."""


@dataclass(frozen=True, kw_only=True)
class SweepConfig(BleuOption, PruningOptions):
    """The options of `headscope prune sweep`; those that it shares with `prune rank` and with learners are theirs."""

    device_map: str | None = None
    methods: tuple[str, ...] = heads_option(
        ("l0", "subset", "random", "magnitude", "confidence", "gradient", "lrp"),
        "l0, subset or another learner, and what prune rank --by has, where it must be said with :lowest or :highest "
        "for the heads that stay.",
        common=True,
    )
    keep: tuple[int, ...] = heads_option(
        (), f"Sizes: {STAY[0].lower()}{STAY[1:]}", metavar="N,N,…", minimum=1, common=True
    )
    keep_fraction: tuple[float, ...] = heads_option(
        (), "Sizes: shares of them that stay.", metavar="F,F,…", above=0, maximum=1, common=True
    )
    lambdas: tuple[float, ...] = heads_option(
        (),
        "l0: these prices of an open head, instead of searching for --keep.",
        name="lambda",
        metavar="L,L,…",
        minimum=0,
    )
    strength_as: Literal["paper", "code"] = heads_option(
        "paper",
        "l0: λ is a price on the sum over heads, or (code) on the mean over attention modules of it.",
        name="lambda-as",
        of="lambdas",
        flagless=True,
    )
    start: Literal["glorot", "open"] | None = heads_option(
        None, "l0: gates at the start, random or open; default: open with --keep, else glorot.", flagless=True
    )
    allocate: Allocation = heads_option("global", ALLOCATE)
    compensate: Literal["none", "mean", "least-squares"] = compensation_option(
        "none",
        "Where a ranking took heads out, refit what is left of the output projections on the text that heads were "
        "scored on, before any tuning, in closed form.",
        common=True,
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
        None,
        "How: a run of `headscope train` or a file of its options; default: the run CKPT lies in.",
        metavar="RUN|FILE.toml",
        of="from_scratch",
        flagless=True,
    )
    metric: str = measuring_option("", "`headscope list metrics`; default: what fits the model.", common=True)
    functions: Path | None = measuring_option(
        None, "A run of `analyze` of CKPT: count the functions of survivors.", metavar="RUN", identity=False
    )
    relabel: bool = measuring_option(
        False,
        "Also label the heads of every pruned model anew, on the text and with the options of that run.",
        of="functions",
        flagless=True,
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
        None,
        "Loss against the unpruned model that counts as none: in the metric's unit, or a percentage of its value; "
        "default: 1 %.",
        metavar="X|X%",
        identity=False,
    )
    keep_models: bool = output_option(
        False,
        "Keep the pruned model of every cell, without the heads that went: column model of sweep.csv.",
        identity=False,
    )
    force: bool = output_option(False, "Begin anew, without the cells that DIR holds.", identity=False, common=True)

    def __post_init__(self) -> None:
        prices = [f"{price:g}" for price in self.lambdas]
        if twice := [price for price in prices if prices.count(price) > 1]:
            raise ConfigError(f"{flag('lambda')} {twice[0]} is there twice; runs are named by six digits: give others")
        _ = self.tolerance, self.refit
        ranks = len(self.learnt) < len(self.methods)
        learnt, known, has_text = ", ".join(sorted(self.learnt)), " and ".join(learners()), self.has_text
        priced, methods = priced_learners(), set(self.methods)
        needs = f"is for rankings, and needs text: give {flag.source} FILE"
        has_sizes = self.keep or self.keep_fraction or (self.lambdas and methods <= set(priced))
        problems: dict[str, object] = {
            f"{flag.allocate} {self.allocate} is for rankings; {flag.methods} names none": self.allocate != "global"
            and not ranks,
            f"{flag.allocate} per-group is for rankings, and {learnt} learns gates of whole groups; sweep it apart": (
                self.allocate == "per-group" and learnt
            ),
            f"{flag.compensate} {self.compensate} {needs}": self.compensate != "none" and not (ranks and has_text),
            f"{flag.allocate} measured {needs}": self.allocate == "measured" and not (ranks and has_text),
            f"{flag('lambda')} is for {flag.methods} {' or '.join(priced)}": self.lambdas
            and methods.isdisjoint(priced),
            f"no sizes: give {flag.keep} 4,8,16 (heads that stay) or {flag.keep_fraction} 0.25,0.5": not has_sizes,
            f"{flag.from_scratch} trains what {known} leave; {flag.methods} names none": self.from_scratch
            and not learnt,
        }
        for name in self.unused_options:
            advice = f"is about learning, and nothing learns; give {flag.tune_updates} N too, or name {known} in"
            what = f"is about gates of {known}; name one in" if name in OF_GATES else advice
            problems[f"{flag(name)} {what} {flag.methods}"] = getattr(self, name) != getattr(type(self), name)
        problems[missing_text("no text to learn from")] = self.trains and not has_text
        nothing = f"no text to measure on: give {flag.valid_source} FILE, or {flag.source} FILE"
        problems[nothing] = not has_text and self.valid_text is None
        raise_first(ConfigError, problems)

    @property
    def refit(self) -> Refit:
        """How output projections are refitted where a ranking took heads out."""
        return Refit(method=self.compensate, sequential=self.sequential)

    @property
    def allocation(self) -> Allocation:
        """How scores are ranked: those that were measured say themselves how many heads a layer keeps."""
        return "global" if self.allocate == "measured" else self.allocate

    @property
    def tolerance(self) -> Margin:
        """The margin of verdicts."""
        return Margin.parse(MARGIN if self.margin is None else self.margin)

    @property
    def trains(self) -> bool:
        """Whether any cell changes weights."""
        return bool(self.tune_updates or self.learnt)

    @property
    def unused_options(self) -> list[str]:
        """The options that mean nothing for these methods; other cells of a directory may have them."""
        return [*(OF_GATES if not self.learnt else ()), *(LEARNT_WITH if not self.trains else ())]

    @property
    def learnt(self) -> set[str]:
        """The methods that learn gates."""
        return set(self.methods) & set(learners())

    def for_cell(self, folder: Path, seed: int, *, force: bool = True) -> dict[str, Any]:
        """The options that a config of a learner or of `prune rank` shares with this one, for the run of a cell."""
        shared = {field.name: getattr(self, field.name) for field in fields(PruningOptions)}
        return {**shared, "out": folder, "seed": seed, "force": force}
