"""The figures of several runs by the names that `headscope plot` gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headscope.errors import ConfigError
from headscope.report.figures.compare import compare_figure
from headscope.report.figures.experts import gates_figure
from headscope.report.figures.pruning import pruning_figure
from headscope.report.figures.training import load_history, training_figure
from headscope.report.readers.pruning_runs import load_pruned
from headscope.report.readers.run import AnalysisRun, load_run

Source = AnalysisRun | Path
"""A run that was read already, or its folder."""


def _compare(
    runs: Sequence[Source], *, measure: str = "confidence", range: str | Sequence[float] | None = None
) -> Figure:
    if len(runs) != 2:
        raise ConfigError(f"the figure 'compare' is of two runs; {len(runs)} given")
    first, second = (run if isinstance(run, AnalysisRun) else load_run(run) for run in runs)
    return compare_figure(first, second, measure, range=range)


def _training(runs: Sequence[Source], *, axis: str = "update") -> Figure:
    return training_figure([load_history(folder) for folder in _folders(runs, "training")], axis=axis)


def _gates(runs: Sequence[Source]) -> Figure:
    if len(runs) != 1:
        raise ConfigError(f"the figure 'gates' is of one run; {len(runs)} given")
    return gates_figure(load_history(_folders(runs, "gates")[0]))


def _pruning(runs: Sequence[Source], *, figure: str | None = None, functions: str | Path | None = None) -> Figure:
    labels = None if functions is None else Path(functions)
    return pruning_figure(load_pruned(_folders(runs, "pruning"), functions=labels), figure)


def _folders(runs: Sequence[Source], name: str) -> list[Path]:
    if wrong := [run for run in runs if isinstance(run, AnalysisRun)]:
        raise ConfigError(f"the figure {name!r} is of runs on disk; {wrong[0].name} is a study")
    return [run for run in runs if isinstance(run, Path)]


SEVERAL: dict[str, Callable[..., Figure]] = {
    "compare": _compare,
    "training": _training,
    "gates": _gates,
    "pruning": _pruning,
}


def draw_several(runs: Sequence[Source], name: str, **options: Any) -> Figure:
    """Draw a figure of several runs; ConfigError for an option that it has not."""
    known = [option for option in inspect.signature(SEVERAL[name]).parameters if option != "runs"]
    for option in options:
        if option not in known:
            raise ConfigError(f"the figure {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return SEVERAL[name](runs, **options)
