"""What every panel of a pruning figure is, and the cells that it shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes

from headscope.report.layout.legend import Entry
from headscope.report.readers.pruning_runs import UNPRUNED, PruningRun


@dataclass(frozen=True)
class PruningPanel:
    """Axes of one kind: the title, what draws into them, and what stands beside the axes with which unit.

    Panels with the same `ylabel` have the same limits.
    """

    title: str
    draw: Callable[[Axes], None]
    xlabel: str
    ylabel: str


Made = tuple[list[PruningPanel], list[Entry]]


def by_method(runs: Sequence[PruningRun]) -> list[tuple[PruningRun, str, pd.DataFrame]]:
    """Cells by run and method, without controls, which have the heads of the cells they control."""
    groups = []
    for run in runs:
        plain = run.cells[(run.cells["control"] == "") & (run.cells["method"] != UNPRUNED)]
        groups += [(run, str(method), cells) for method, cells in plain.groupby("method", sort=False)]
    return groups


def named(runs: Sequence[PruningRun], run: PruningRun, method: str) -> str:
    """The method, with the run's name where there are several."""
    return method if len(runs) == 1 else f"{run.name}: {method}"
