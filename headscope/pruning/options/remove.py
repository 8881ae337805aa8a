"""The options of `headscope prune remove`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headscope.config.inputs import (
    data_option,
    model_option,
    output_option,
)
from headscope.config.option import TextLines
from headscope.errors import ConfigError, check_one_given
from headscope.pruning.options.rank import SEQUENTIAL
from headscope.pruning.options.refit import AUTO, AUTO_DAMPING, DAMPING, NEEDS_TEXT, Refit, as_text
from headscope.pruning.options.shared import (
    ANCHOR,
    SmallerModelOptions,
    compensation_option,
    heads_option,
)


@dataclass(frozen=True, kw_only=True)
class RemoveConfig(SmallerModelOptions):
    """The options of `headscope prune remove`.

    `heads` go, or all but `keep_only`, or all stay and key/value heads are merged (see `plan_merge`). `export` holds at
    most one kind of folder, and files for engines besides.
    """

    heads: str | None = heads_option(
        None,
        "Heads that go: 2.5,3.* where the model has one site, cross.0.*, or a file with a name a line.",
        metavar="LIST",
        common=True,
    )
    keep_only: str | None = heads_option(
        None, "Heads that stay, of the sites that the list names.", metavar="LIST", common=True
    )
    merge_kv: tuple[int, ...] = heads_option(
        (),
        "Instead: all heads stay, and the key/value heads of every layer become N, each the mean of several, for a "
        "smaller cache (--export native, the default then, is a plain class); or a number for each layer, N,N,… "
        "(--export deci-hf, gguf).",
        metavar="N[,N…]",
    )
    merge_by: Path | None = heads_option(
        None,
        "Merge those that are neighbours by these scores of heads; default: those that stand side by side.",
        metavar="FILE.csv|RUN",
        of="merge_kv",
    )
    allocate: Literal["uniform", "measured"] = heads_option(
        "uniform",
        "How many key/value heads each layer keeps: N, or N on average, where merging costs least on --source by "
        "--objective, measured layer by layer (slow; --export deci-hf, gguf, self-contained).",
    )
    column: str | None = heads_option(None, "Column of --merge-by.", of="merge_by", flagless=True)
    pad: bool = output_option(
        False,
        "Fill every layer up with heads of zeros to as many as the layer that keeps most, so that a plain class holds "
        "it (--export native); saves less, takes any heads.",
    )
    source: TextLines | None = data_option(
        None,
        "Text to compare, calibrate and time on (.gz too); default: the sample that ships with headscope.",
        common=True,
    )
    max_sentences: int = data_option(32, "Lines to compare on.", minimum=1)
    batch: int = model_option(
        64, "Sentences in the large batch that is timed.", minimum=1, maximum=4096, identity=False, flagless=True
    )
    compensate: Literal["none", "mean", "least-squares", "auto"] = compensation_option(
        "none",
        "Refit what is left of the output projections on --source, in closed form. Least-squares refits weights and "
        "bias, mean moves the mean of removed heads into the bias, auto takes what harms least on held-out text and on "
        "--check.",
        common=True,
    )
    anchor: tuple[str, ...] = compensation_option((), ANCHOR, metavar="NAME|FILE[,TARGET]")
    damping: float | None = compensation_option(
        None,
        f"Ridge of least-squares, a share of the mean second moment; default: {DAMPING:g}, with auto {AUTO_DAMPING:g}.",
        minimum=0,
        flagless=True,
    )
    strength: float = compensation_option(
        1.0,
        "How far a projection goes to its refit: 0.5 is half the way from what it was; auto tries that too.",
        above=0,
        maximum=1,
        flagless=True,
    )
    sequential: bool = compensation_option(False, SEQUENTIAL)
    objective: str = data_option(
        "", "What a compensation, or --allocate, is measured by (`headscope list objectives`); default: what fits."
    )
    margin: str | None = data_option(
        None,
        "Loss of that metric that counts as none: in its unit, or a percentage of the intact model's; default: 1%.",
        metavar="N|N%",
    )

    def __post_init__(self) -> None:
        _ = self.calibration
        if self.compensate != "none" and not self.has_text:
            raise ConfigError(f"--compensate {self.compensate} {NEEDS_TEXT}")
        if self.objective and not self.measured:
            raise ConfigError(
                "--objective is what a refit is measured by; give --compensate or --valid-source, or --allocate "
                "measured"
            )
        if self.calibration_sentences != type(self).calibration_sentences and not self.measured:
            raise ConfigError("--calibration-sentences is about --compensate, and nothing is refitted; leave it out")
        check_one_given(
            {
                "--heads LIST, the heads that go": self.heads,
                "--keep-only LIST, those that stay": self.keep_only,
                "--merge-kv N, the key/value heads that stay": self.merge_kv or None,
            }
        )
        if self.allocate == "measured" and (len(self.merge_kv) != 1 or not self.has_text):
            raise ConfigError(
                "--allocate measured chooses key/value heads by layer on text: give --merge-kv N, one number, their "
                "mean, and --source FILE"
            )
        if self.merge_kv and self.pad:
            raise ConfigError("--pad is for removed heads; --merge-kv leaves all query heads where they are")
        if self.merge_kv and self.compensate in ("mean", AUTO):
            raise ConfigError(
                f"--compensate {self.compensate} is for removed heads; with --merge-kv choose least-squares or none"
            )

    @property
    def measured(self) -> bool:
        """Whether the objective measures something: a refit, or an allocation."""
        return self.compensate != "none" or self.valid_text is not None or self.allocate == "measured"

    @property
    def calibration(self) -> Refit:
        """How the removal is compensated: after a merge always module after module, as all contexts are others."""
        merges = bool(self.merge_kv) and self.compensate == "least-squares"
        return Refit(
            method=self.compensate,
            damping=self.damping,
            sentences=self.calibration_sentences,
            sequential=self.sequential or merges,
            feed_forward=self.feed_forward,
            objective=self.objective,
            anchor=as_text(self.anchor),
            check=as_text(self.check),
            strength=self.strength,
        )
