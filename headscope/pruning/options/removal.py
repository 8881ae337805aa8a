"""The options of `headscope prune remove` and `shrink`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from headscope.config.declarations import declared_engines
from headscope.config.inputs import data_option, model_option, output_option
from headscope.config.option import SEED, TextLines
from headscope.errors import ConfigError, check_one_given, flag, raise_first
from headscope.evaluation.margin import MARGIN, Margin
from headscope.pruning.options.choice import SEQUENTIAL, Allocation, SweepConfig
from headscope.pruning.options.shared import (
    ANCHOR,
    AUTO,
    AUTO_DAMPING,
    DAMPING,
    STAY,
    TEXT,
    Compensation,
    HeadChoice,
    Refit,
    SmallerModelOptions,
    compensation_option,
    heads_option,
    missing_text,
)


@dataclass(frozen=True, kw_only=True)
class RemoveConfig(SmallerModelOptions):
    """The options of `headscope prune remove`.

    It removes `heads`, or all but `keep_only`, or it merges key/value heads (see `plan_merge`). `export` names at most
    one kind of folder, and any files for engines.
    """

    heads: str | None = heads_option(
        None, "Heads to remove: 2.5,3.*, cross.0.*, or a file with a name a line.", metavar="LIST", common=True
    )
    keep_only: str | None = heads_option(
        None, "Heads to keep, of the sites that the list names.", metavar="LIST", common=True
    )
    merge_kv: tuple[int, ...] = heads_option(
        (), "Instead: merge the key/value heads of every layer into N, or N,N,… (by layer).", metavar="N[,N…]"
    )
    merge_by: Path | None = heads_option(
        None, "Merge neighbours by these scores; default: those side by side.", metavar="FILE.csv|RUN", needs="merge_kv"
    )
    allocate: Literal["uniform", "measured"] = heads_option(
        "uniform", "Key/value heads of a layer: N, or measured: N on average, where merging costs least (slow)."
    )
    column: str | None = heads_option(None, "Column of --merge-by.", needs="merge_by", flagless=True)
    pad: bool = output_option(
        False, "Fill layers up with heads of zeros to the largest, for a plain class (native).", excludes="merge_kv"
    )
    source: TextLines | None = data_option(
        None, "Text to compare, calibrate and time on (.gz too); default: the sample that ships.", common=True
    )
    max_sentences: int = data_option(32, "Lines to compare on.", minimum=1)
    batch: int = model_option(
        64, "Sentences in the large batch that is timed.", minimum=1, maximum=4096, identity=False, flagless=True
    )
    compensate: Literal[Compensation, "auto"] = compensation_option(
        "none",
        "Refit the remaining output projections: weights and bias, their mean alone, or what harms least (auto).",
        common=True,
        needs=TEXT,
    )
    anchor: tuple[str, ...] = compensation_option((), ANCHOR, metavar="NAME|FILE[,TARGET]")
    damping: float | None = compensation_option(
        None,
        f"Ridge, a share of second moments; default: {DAMPING:g}, or {AUTO_DAMPING:g} with auto or on short text.",
        minimum=0,
        flagless=True,
    )
    strength: float = compensation_option(
        1.0, "Step towards the refit, 1 is all of it; auto tries 0.5 and 0.25 too.", above=0, maximum=1, flagless=True
    )
    sequential: bool = compensation_option(False, SEQUENTIAL)
    objective: str = data_option(
        "", "Objective of a compensation, or of --allocate (`headscope list objectives`); default: what fits the model."
    )
    margin: str | None = data_option(
        None, "Loss of the metric that counts as none, in its unit or per cent; default: 1 %.", metavar="N|N%"
    )

    def __post_init__(self) -> None:
        _ = self.calibration
        check_one_given(
            {
                f"{flag.heads} LIST, the heads to remove": self.heads,
                f"{flag.keep_only} LIST, the heads to keep": self.keep_only,
                f"{flag.merge_kv} N, the key/value heads that stay": self.merge_kv or None,
            }
        )
        refits = f"is for refits; give {flag.compensate}, {flag.valid_source} or {flag.allocate} measured"
        requirement = f"give {flag.merge_kv} N, one number, their mean, and {flag.source} FILE"
        method = f"{flag.compensate} {self.compensate}"
        problems = {
            f"{flag(name)} {refits}": getattr(self, name) != getattr(type(self), name) and not self.measures_quality
            for name in ("objective", "calibration_sentences")
        }
        problems |= {
            f"{flag.allocate} measured chooses key/value heads on text: {requirement}": self.allocate == "measured"
            and (len(self.merge_kv) != 1 or not self.has_text),
            f"{method} is for removed heads; take least-squares or none": bool(self.merge_kv)
            and self.compensate in ("mean", AUTO),
        }
        raise_first(ConfigError, problems)

    @property
    def measures_quality(self) -> bool:
        """Whether the objective measures a refit, held-out text or an allocation."""
        return self.compensate != "none" or self.valid_text is not None or self.allocate == "measured"

    @property
    def calibration(self) -> Refit:
        """The refit after the removal; after a merge, which changes all contexts, module after module."""
        merges = bool(self.merge_kv) and self.compensate == "least-squares"
        return Refit.of(self, sequential=self.sequential or merges)


SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Shares of heads to keep that --max-drop tries, in this order."""


@dataclass(frozen=True, kw_only=True)
class ShrinkConfig(SmallerModelOptions, HeadChoice):
    """The options of `headscope prune shrink`; only the text is required."""

    keep: int | None = heads_option(None, STAY, minimum=1, common=True, excludes="keep_fraction|max_drop")
    keep_fraction: float | None = heads_option(
        None, "Instead: the share of heads to keep.", metavar="F", above=0, maximum=1, common=True, excludes="max_drop"
    )
    max_drop: str | None = heads_option(
        None,
        "Instead: the smallest of 7/8, 3/4, … of the heads that loses no more than this, in the metric's unit or in "
        f"per cent; default: {MARGIN}.",
        metavar="X|X%",
        common=True,
    )
    by: str = heads_option(
        "", "Criterion to rank heads by; default: fisher; with another --allocate obs-task or obs, as fits."
    )
    allocate: Allocation | None = heads_option(
        None, "As in prune rank; default: measured; with --export native and ctranslate2 uniform, laguna per-group."
    )
    compensate: Literal[Compensation, "auto"] = compensation_option(
        AUTO, "How to refit the remaining output projections; auto chooses what harms least, also on --check."
    )
    seed: int = model_option(1, "Seed of what is drawn.", minimum=0, maximum=SEED)

    def __post_init__(self) -> None:
        uniform = [name for name, allocation in self.required_allocations.items() if allocation == "uniform"]
        if uniform and self.allocation != "uniform":
            raise ConfigError(
                f"{flag.export} {uniform[0]} needs {flag.allocate} uniform, its default; leave {flag.allocate} out"
            )
        _ = self.margin, self.refit
        if not self.has_text:
            raise ConfigError(missing_text("no text to rank, refit and measure on"))

    @property
    def searches(self) -> bool:
        """Whether the size is searched for, by its loss."""
        return self.keep is None and self.keep_fraction is None

    @property
    def margin(self) -> str:
        """The largest loss of the metric that counts as none, in its unit or in per cent."""
        drop = MARGIN if self.max_drop is None else self.max_drop
        with flag.spelling(margin="max_drop"):
            return str(Margin.parse(drop))

    @property
    def refit(self) -> Refit:
        """The refit after the removal."""
        return Refit.of(self, **({"check": ()} if self.compensate == "none" else {}))

    @property
    def required_allocations(self) -> dict[str, str]:
        """The allocation that each export requires."""
        allocations = {"native": "uniform"} | {engine.name: engine.allocation for engine in declared_engines()}
        return {name: allocation for name, allocation in allocations.items() if allocation and name in self.export}

    @property
    def allocation(self) -> Allocation:
        """The allocation of heads to layers."""
        return self.allocate or cast(Allocation, next(iter(self.required_allocations.values()), "measured"))

    def sizes(self, folder: Path, *, by: str, metric: str) -> SweepConfig:
        """The options of a sweep over the sizes to try, in `folder`, by a criterion and a metric; it does not refit."""
        names = {entry.name for entry in fields(SweepConfig)} & {entry.name for entry in fields(self)}
        shared = {name: getattr(self, name) for name in names - {"keep", "keep_fraction", "compensate"}}
        options: dict[str, Any] = {
            **{"out": folder, "methods": (by,), "allocate": self.allocation, "metric": metric},
            "margin": self.margin if self.searches else None,
            "keep": () if self.keep is None else (self.keep,),
            "keep_fraction": SHARES if self.searches else tuple(filter(None, [self.keep_fraction])),
            **{"score_sentences": self.calibration_sentences, "hiding": "random", "seeds": 1},
        }
        return SweepConfig(**{**shared, **options})
