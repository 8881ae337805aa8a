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


def spread(runs: Sequence[Any], *, column: str) -> Any:
    """A box for every run."""
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.add_subplot(ylabel=column)
    axes.boxplot([run.heads[run.require(column)].dropna() for run in runs])
    axes.set_xticklabels([run.name for run in runs])
    return figure


SPREAD = PlotFigure("spread", "Boxes of a column, one a run.", spread, Options=SpreadOptions, runs="together")
