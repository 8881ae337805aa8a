"""The options of `headscope prune rank`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from headscope.config.inputs import batch_tokens_option, data_option
from headscope.config.option import flag
from headscope.errors import ConfigError, check_one_given
from headscope.pruning.options.refit import DAMPING, Refit, RefitOptions, as_text
from headscope.pruning.options.shared import (
    ANCHOR,
    LEARNT_WITH,
    MEASURED_TEXT,
    STAY,
    TEXT,
    SelectionConfig,
    compensation_option,
    heads_option,
)

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
    keep_highest: bool = heads_option(False, "Heads with high values stay.")
    steps: int = heads_option(1, "Take heads out in N steps, and score anew before each.", minimum=1)
    allocate: Allocation = heads_option("global", ALLOCATE, common=True)
    compensate: Literal["none", "mean", "least-squares"] = compensation_option(
        "none",
        "Then refit what is left of the output projections on the text that heads were scored on, before any tuning, "
        "in closed form.",
        common=True,
    )
    anchor: tuple[str, ...] = compensation_option(
        (),
        f"{ANCHOR} --allocate measured refits so too.",
        metavar="NAME|FILE[,TARGET]",
        flagless=True,
    )
    sequential: bool = compensation_option(False, SEQUENTIAL)
    damping: float = heads_option(
        DAMPING,
        "Ridge of criteria and allocations that refit, a share of the mean second moment.",
        minimum=0,
        flagless=True,
    )
    score_sentences: int = data_option(500, "Lines of --source to score on.", minimum=1, of=TEXT)
    batch_tokens: int | None = batch_tokens_option(of=MEASURED_TEXT)

    def __post_init__(self) -> None:
        changed = [name for name in LEARNT_WITH if getattr(self, name) != getattr(type(self), name)]
        if changed and not self.tune_updates:
            raise ConfigError(f"{flag(changed[0])} is about learning, and nothing learns; give --tune-updates N too")
        if self.keep_lowest and self.keep_highest:
            raise ConfigError("--keep-lowest and --keep-highest: heads of one end stay; give one of them")
        check_one_given(
            {"--keep N, the heads that stay": self.keep, "--keep-fraction F, the share that stays": self.keep_fraction}
        )
        if self.column is not None and not self.is_file:
            raise ConfigError("--column is for --by FILE.csv")
        if self.run is not None and self.is_file:
            raise ConfigError("--from RUN and --by FILE.csv both say where scores are; give one of them")
        if self.steps > 1 and (self.is_file or self.run is not None):
            raise ConfigError(f"--steps {self.steps} scores anew, which needs a criterion that can be measured")
        if self.allocate == "measured" and (not self.has_text or self.steps > 1):
            raise ConfigError("--allocate measured measures on text, in one step: give --source FILE, and no --steps")
        _ = self.refit
        if self.compensate != "none" and not self.has_text:
            raise ConfigError(f"--compensate {self.compensate} measures contexts on text: give --source FILE")
        if self.tune_updates and not self.has_text:
            raise ConfigError("--tune-updates needs text: give --source FILE, and --target FILE for translation")

    @property
    def refit(self) -> RefitOptions:
        """How output projections are refitted."""
        anchor = "" if self.compensate != "least-squares" and self.measures else as_text(self.anchor)
        refit = Refit(method=self.compensate, sequential=self.sequential, anchor=anchor)
        return replace(refit.options(), damping=self.damping)

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
