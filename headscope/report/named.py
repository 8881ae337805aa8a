"""The figures of one run by the names that `headscope plot` gives them, and those that every run gets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from headscope.engine.declarations import analysis_figures, imported
from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report.figures.faithfulness import faithfulness_figure
from headscope.report.figures.functionmap import functions_figure
from headscope.report.figures.headmap import heads_figure
from headscope.report.figures.rankings import rankings_figure, ranks_of
from headscope.report.layout.save import write_figure
from headscope.report.readers.run import AnalysisRun, MissingTable, load_run


def _heads(
    run: AnalysisRun,
    *,
    measure: str | Sequence[str] | None = None,
    sort: bool = False,
    range: str | Sequence[float] | None = None,
) -> Figure:
    return heads_figure(run, [measure] if isinstance(measure, str) else measure, sort=sort, range=range)


def _functions(run: AnalysisRun) -> Figure:
    return functions_figure(run)


def _faithfulness(run: AnalysisRun, *, metric: str | None = None) -> Figure:
    return faithfulness_figure(run, metric)


def _rankings(run: AnalysisRun, *, ranking: str | Sequence[str] | None = None) -> Figure:
    return rankings_figure(run, [ranking] if isinstance(ranking, str) else ranking)


FIRST: dict[str, Callable[..., Figure]] = {"heads": _heads, "functions": _functions}
LAST: dict[str, Callable[..., Figure]] = {"rankings": _rankings, "faithfulness": _faithfulness}
"""Figures of whole runs, before and after those that analyses declare."""
FEW = 3  # rankings: fewer are compared when that is asked for


def figure_names() -> list[str]:
    """The names that `draw` knows."""
    return [*FIRST, *analysis_figures(), *LAST]


def draw(run: AnalysisRun, name: str, **options: Any) -> Figure:
    """Draw a figure of a run; ConfigError for an unknown name or option, with those that there are.

    MissingTable where the analysis that it shows was not part of the run.
    """
    if name not in figure_names():
        raise ConfigError(unknown("figure", name, figure_names()))
    draw_run = {**FIRST, **LAST}.get(name)
    if draw_run is not None:
        known = [option for option in inspect.signature(draw_run).parameters if option != "run"]
    else:
        known = [option.name for option in fields(analysis_figures()[name][1].Options)]
    for option in options:
        if option not in known:
            raise ConfigError(f"the figure {name!r} has no option {option!r}; it has {', '.join(known) or 'none'}")
    return draw_run(run, **options) if draw_run is not None else _of_analysis(run, name, options)


def _of_analysis(run: AnalysisRun, name: str, options: dict[str, Any]) -> Figure:
    figure = analysis_figures()[name][1]
    settings = {option.name: options.get(option.name, option.default) for option in fields(figure.Options)}
    drawn: Figure = imported(figure.draw)(run, **settings)
    return drawn


def draw_standard(run_dir: Path | str, *, dpi: int | None = None) -> list[Path]:
    """Draw the figures of a run whose tables it has, as PNG in its `figures` folder, replacing older ones.

    Returns the files written, in order.
    """
    run = load_run(run_dir)
    declared = analysis_figures()
    stems = {name: figure.stem for name, (analysis, figure) in declared.items() if _ran(run, analysis)}
    written = []
    for name, stem in {**{name: name for name in FIRST}, **stems, **{name: name for name in LAST}}.items():
        try:
            if name == "rankings" and len(ranks_of(run).columns) < FEW:
                continue
            figure = draw(run, name)
        except MissingTable:
            continue
        written.append(write_figure(figure, run.path / "figures" / f"{stem}.png", dpi=dpi, force=True))
    return written


def _ran(run: AnalysisRun, analysis: str) -> bool:
    return run.analyses is None or any(name == analysis or name.startswith(f"{analysis}.") for name in run.analyses)
