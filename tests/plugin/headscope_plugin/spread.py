"""A figure of several runs, with an option: how the values of a column are spread in each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headscope.config import option
from headscope.report.registry import PlotFigure


@dataclass(frozen=True)
class SpreadOptions:
    """Options of the figure."""

    column: str = option("confidence", "Column of heads.csv.", metavar="NAME")


def spread(runs: Sequence[Any], figure: Any, options: SpreadOptions) -> None:
    """A box for every run."""
    axes = figure.add_subplot(ylabel=options.column)
    axes.boxplot([run.heads[run.require(options.column)].dropna() for run in runs])
    axes.set_xticklabels([run.name for run in runs])


SPREAD = PlotFigure("spread", "Boxes of a column, one a run.", spread, Options=SpreadOptions, runs="together")
