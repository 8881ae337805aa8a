"""What `headscope prune rank` can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headscope.errors import ConfigError, check_one_given
from headscope.files.reading import is_file
from headscope.pruning.closed_form.block_obs import DAMPING
from headscope.pruning.closed_form.compensate import RefitOptions
from headscope.pruning.ranking.criterion import End, given_end
from headscope.pruning.selection import SelectionConfig
from headscope.registry import unknown

ALLOCATIONS = ("global", "per-layer", "uniform", "measured")
"""How many heads each layer keeps."""


@dataclass(frozen=True, kw_only=True)
class RankConfig(SelectionConfig):
    """What heads are ranked by, how many stay, and what follows.

    `by` is a criterion, a column of `heads.csv`, or a CSV file (`column` then says which of its columns); `run` is
    a run of `analyze` whose `heads.csv` is read instead of measuring; `keep_lowest` or `keep_highest` says which heads
    stay (default: as the criterion declares). `keep` heads stay, or the `fraction` of them. `score_sentences` of the
    text are scored on. `allocate` says how many of them each layer keeps: as the scores of all heads say ("global"),
    the same share ("per-layer", also `per_layer`), the same number in each stack ("uniform", also `uniform`), or as the
    objective says that is "measured" with what is left refitted. Then `compensate` refits the output projections
    ("mean" or "least-squares") on the text scored on, before any tuning; with `sequential` module after module.
    `damping` is for whatever refits.
    """

    by: str
    run: Path | None = None
    column: str | None = None
    keep_lowest: bool = False
    keep_highest: bool = False
    keep: int | None = None
    fraction: float | None = None
    steps: int = 1
    per_layer: bool = False
    uniform: bool = False
    allocate: str = "global"
    compensate: str = "none"
    sequential: bool = False
    damping: float = DAMPING
    score_sentences: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        given_end(keep_lowest=self.keep_lowest, keep_highest=self.keep_highest)
        check_one_given(
            {"--keep N, the heads that stay": self.keep, "--fraction F, the share that stays": self.fraction}
        )
        if self.fraction is not None and not 0 <= self.fraction <= 1:
            raise ConfigError(f"--fraction {self.fraction:g}: the share that stays is from 0 to 1")
        if self.steps < 1 or self.tune_updates < 0:
            raise ConfigError(f"--steps {self.steps} --tune-updates {self.tune_updates}: at least 1, and at least 0")
        if self.column is not None and not self.is_file:
            raise ConfigError("--column is for --by FILE.csv")
        if self.run is not None and self.is_file:
            raise ConfigError("--from RUN and --by FILE.csv both say where scores are; give one of them")
        if self.steps > 1 and (self.is_file or self.run is not None):
            raise ConfigError(f"--steps {self.steps} scores anew, which needs a criterion that can be measured")
        if self.allocate not in ALLOCATIONS:
            raise ConfigError(unknown("allocation", self.allocate, list(ALLOCATIONS)))
        for name in ("per-layer", "uniform"):
            others = {self.allocate, *(["uniform"] if self.uniform else [])} - {"global", name}
            if getattr(self, name.replace("-", "_")) and others:
                raise ConfigError(f"--{name} is --allocate {name}, which is {others.pop()} here; give one of them")
        if self.allocate == "measured" and (self.source is None or self.steps > 1):
            raise ConfigError("--allocate measured measures on text, in one step: give --source FILE, and no --steps")
        _ = self.refit
        if self.compensate != "none" and self.source is None:
            raise ConfigError(f"--compensate {self.compensate} measures contexts on text: give --source FILE")
        if self.tune_updates and not self.has_text:
            raise ConfigError("--tune-updates needs text: give --source FILE, and --target FILE for translation")

    @property
    def refit(self) -> RefitOptions:
        """How output projections are refitted."""
        return RefitOptions(method=self.compensate, damping=self.damping, sequential=self.sequential)

    @property
    def allocation(self) -> str:
        """One of `ALLOCATIONS`."""
        return "per-layer" if self.per_layer else "uniform" if self.uniform else self.allocate

    @property
    def end(self) -> End | None:
        """Which end the user wants to stay."""
        return given_end(keep_lowest=self.keep_lowest, keep_highest=self.keep_highest)

    @property
    def is_file(self) -> bool:
        """Whether `by` is a file."""
        return self.by.endswith(".csv") or is_file(self.by)
