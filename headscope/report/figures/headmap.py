"""Layers × heads maps of measures with function marks, after figure 1 of Voita et al. 2019."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headscope.config import option
from headscope.config.declarations import measure_of, overview_measures
from headscope.errors import ConfigError
from headscope.report.charts import measure_limits
from headscope.report.grid import Grid, blank_entries, draw_grid, grids_of
from headscope.report.marks import function_entries
from headscope.report.registry import RUNS, PlotFigure
from headscope.report.sheet import BAR, BESIDE, Sheet
from headscope.results.study import Study
from headscope.results.study_answers import importance_label, main_importance

LINES = 3
"""Functions that a cell writes out at most."""


@dataclass(frozen=True)
class HeadsOptions:
    """Options of the figure."""

    measure: tuple[str, ...] = option(
        (), "Column of heads.csv; repeat it for several maps.", metavar="NAME", repeat=True
    )
    sort: bool = option(False, "Sort the heads of each layer by the measure.")
    range: tuple[float, ...] = option(
        (), "Range of the scale, such as 0,1; default: that of the measure.", metavar="LOW,HIGH"
    )
    unsupported: bool = option(False, "Also mark functions that lack evidence, in brackets.")


def draw_heads(run: Study, sheet: Sheet, options: HeadsOptions) -> None:
    """A grid for every measure and site; colours go over the range that the measure declares, or over `range`.

    Sites of which no head has a value are left out. With `unsupported` functions that lack evidence are in brackets.
    """
    chosen = [run.require(name) for name in options.measure] if options.measure else shown_measures(run)
    by_measure = {name: _valued(run, name, options) for name in chosen}
    grids = [grid for own in by_measure.values() for grid in own]
    lines = min(max(grid.busiest for grid in grids), LINES) + options.sort
    titles = [f"{measure_of(name).words} · {grid.site}" for name, own in by_measure.items() for grid in own]
    ends = np.cumsum([len(own) for own in by_measure.values()])
    several = ends[0] > 1  # sites
    panels = sheet.panels(
        titles,
        [grid.size(lines) for grid in grids],
        starts={*map(int, ends)} if several else (),
        bar=bool(several),
        beside=BESIDE if several else BESIDE + BAR,
        share="",
    )
    for (name, own), end in zip(by_measure.items(), ends, strict=True):
        measure, places, values = measure_of(name), panels[end - len(own) : end], [grid.values for grid in own]
        norm = measure_limits(measure, values, options.range)
        for axes, grid in zip(places, own, strict=True):
            shades = draw_grid(sheet, axes, grid, cmap=measure.cmap, norm=norm, lines=lines, ranks=options.sort)
        sheet.scale(shades, places, importance_label(run, measure), values)
    marks = [mark for grid in grids for mark in grid.marks]
    sheet.key(*function_entries(marks, colored=False), *blank_entries(grids))
    sheet.headline(
        "Attention heads: " + ", ".join(measure_of(name).words for name in chosen), f"{run.model} · {run.data}"
    )


def _valued(run: Study, measure: str, options: HeadsOptions) -> list[Grid]:
    every = grids_of(run, measure, sort=options.sort, unsupported=options.unsupported)
    return [grid for grid in every if np.isfinite(grid.values).any()] or every


def shown_measures(run: Study) -> list[str]:
    """The importance that says which heads matter, else the standard measures; ConfigError where there are none."""
    main = main_importance(run)
    if main and main.name in run.measures:
        return [main.name]
    measures = [measure for measure in overview_measures() if measure in run.measures] or run.measures[:1]
    if not measures:
        raise ConfigError(f"run {run.name} has no measure to draw; analyse again without --only or --skip")
    return measures


HEADS = PlotFigure(
    "heads",
    "Layers × heads maps of measures, with the functions of the heads; also of the MHR fork's confidence files.",
    draw_heads,
    Options=HeadsOptions,
    source=replace(
        RUNS, metavar="RUN|PICKLE", help="Directories of runs, pickles of runs, or pickles that the MHR fork wrote."
    ),
    from_pickle="headscope.report.fork:confidence_run",
    every_run=True,
    order=10,
)
