"""The options of `headscope prune shrink`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from headscope.config.engines import declared_engines
from headscope.config.inputs import model_option
from headscope.config.option import SEED, flag
from headscope.errors import ConfigError
from headscope.evaluation.margin import MARGIN, Margin
from headscope.pruning.options.rank import Allocation
from headscope.pruning.options.refit import AUTO, Refit, as_text
from headscope.pruning.options.shared import (
    STAY,
    HeadChoice,
    SmallerModelOptions,
    compensation_option,
    heads_option,
)
from headscope.pruning.options.sweep import SweepConfig

SHARES = (0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125)
"""Of the heads that stay, in the sizes that --max-drop tries, one after the other."""


@dataclass(frozen=True, kw_only=True)
class ShrinkConfig(SmallerModelOptions, HeadChoice):
    """The options of `headscope prune shrink`: how small, on which text; all else has a default."""

    keep: int | None = heads_option(None, STAY, minimum=1, common=True)
    keep_fraction: float | None = heads_option(
        None, "Instead: share of the heads that stays.", metavar="F", above=0, maximum=1, common=True
    )
    max_drop: str | None = heads_option(
        None,
        "Instead: the smallest of 7/8, 3/4, 5/8, … of the heads that is not worse by more than this, in the metric's "
        f"unit or as a percentage of its value, at 95 % (default: {MARGIN}).",
        metavar="X|X%",
        common=True,
    )
    by: str = heads_option(
        "",
        "What heads are ranked by, as in prune sweep --methods; default: fisher, without --allocate measured obs-task "
        "where there is something to predict, else obs.",
    )
    allocate: Allocation | None = heads_option(
        None,
        "How many heads each layer keeps, as in prune rank; default: measured, with --export native and "
        "ctranslate2 uniform, with laguna per-group.",
    )
    compensate: Literal["none", "mean", "least-squares", "auto"] = compensation_option(
        AUTO,
        "How what is left of the output projections is refitted, as in prune remove; auto takes what harms least there "
        "and on the second text.",
    )
    seed: int = model_option(1, "Seed of what is drawn.", minimum=0, maximum=SEED)

    def __post_init__(self) -> None:
        both = [flag(name) for name in ("keep", "keep_fraction", "max_drop") if getattr(self, name) is not None]
        if len(both) > 1:
            raise ConfigError(f"{' and '.join(both)} both say how small the model gets; give one of them")
        if self.feed_forward and self.compensate not in (AUTO, "least-squares"):
            raise ConfigError(f"--feed-forward is for --compensate {AUTO} and least-squares, not {self.compensate}")
        even = [name for name, allocation in self.needed.items() if allocation == "uniform"]
        if even and self.allocation != "uniform":
            raise ConfigError(
                f"--export {even[0]} has as many heads in every layer, and --allocate {self.allocation} leaves other "
                "numbers; take --allocate uniform (the default then), or another --export"
            )
        _ = self.margin, self.refit, self.valid_text
        if not self.has_text:
            raise ConfigError("no text to rank, refit and measure on: give --source FILE, and --target for translation")

    @property
    def searches(self) -> bool:
        """Whether the size is found by what it costs."""
        return self.keep is None and self.keep_fraction is None

    @property
    def margin(self) -> str:
        """The loss that counts as none."""
        drop = MARGIN if self.max_drop is None else self.max_drop
        try:
            return str(Margin.parse(drop))
        except ConfigError as error:
            raise ConfigError(str(error).replace("--margin", "--max-drop")) from None

    @property
    def refit(self) -> Refit:
        """How the heads that stay make up for those that go."""
        return Refit(
            method=self.compensate,
            sentences=self.calibration_sentences,
            feed_forward=self.feed_forward,
            objective=self.objective,
            check=as_text(self.check) if self.check and self.compensate != "none" else (),
        )

    @property
    def needed(self) -> dict[str, str]:
        """How many heads each layer must keep, by the export that wants it so."""
        required = {"native": "uniform"} | {engine.name: engine.allocation for engine in declared_engines()}
        return {name: allocation for name, allocation in required.items() if allocation and name in self.export}

    @property
    def allocation(self) -> Allocation:
        """How many heads each layer keeps."""
        return self.allocate or cast(Allocation, next(iter(self.needed.values()), "measured"))

    def sizes(self, folder: Path, *, by: str, metric: str) -> SweepConfig:
        """The sweep over the sizes that are tried, in a folder of its own, by a criterion and a metric."""
        names = {entry.name for entry in fields(SweepConfig)} & {entry.name for entry in fields(self)}
        shared = {
            name: getattr(self, name) for name in names - {"keep", "keep_fraction", "compensate"}
        }  # refits are made elsewhere
        options: dict[str, Any] = {
            **{"out": folder, "methods": (by,), "allocate": self.allocation, "metric": metric},
            "margin": self.margin if self.searches else None,
            "keep": () if self.keep is None else (self.keep,),
            "keep_fraction": SHARES if self.searches else tuple(filter(None, [self.keep_fraction])),
            **{"score_sentences": self.calibration_sentences, "hiding": "random", "seeds": 1},
        }
        return SweepConfig(**{**shared, **options})
