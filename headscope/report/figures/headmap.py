"""Layers × heads maps of measures with function marks, after figure 1 of Voita et al. 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config import option
from headscope.config.declarations import Measure, measure_of, overview_measures
from headscope.errors import ConfigError
from headscope.report.layout.grid import (
    ABOVE,
    BELOW,
    LEFT,
    Grid,
    cell_size,
    draw_blanks,
    draw_cells,
    draw_marks,
    grids_of,
    label_grid,
    measure_limits,
    parse_range,
)
from headscope.report.layout.legend import Legend, legend_entries
from headscope.report.layout.output import widest
from headscope.report.layout.page import BAR, LABEL, Page, flow, shorten, text_width
from headscope.report.registry import RUNS, PlotFigure
from headscope.results.study import Study

WIDEST = 14.5  # inches: more panels than fit start a new line
LINES = 3  # functions that a cell writes out at most


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


@dataclass(frozen=True)
class HeadMapPanel:
    """One grid with its scale; `bar` where the colour bar of the measure stands."""

    grid: Grid
    measure: Measure
    norm: Normalize
    bar: bool
    cell: tuple[float, float]
    all_values: tuple[NDArray[np.float64], ...]
    """Those of all sites, which share the scale."""

    @property
    def size(self) -> tuple[float, float]:
        """Inches with labels and colour bar."""
        layers = len(self.grid.heads)
        return LEFT + self.reach + (BAR if self.bar else 0), ABOVE + layers * self.cell[1] + BELOW

    @property
    def reach(self) -> float:
        """Inches of the map, or of its title where that is longer: the colour bar stands beyond both."""
        slots: int = self.grid.heads.shape[1]
        return max(slots * self.cell[0], text_width(self.title, LABEL, weight="bold"))

    @property
    def title(self) -> str:
        """Measure and site, no wider than the figure may be: the measure is what is cut."""
        site = f" · {self.grid.site}"
        room = widest(WIDEST, besides=LEFT + BAR + 0.1 + text_width(site, LABEL, weight="bold"))
        return shorten(self.measure.words, room, LABEL, weight="bold") + site


def heads_figure(
    run: Study,
    measure: Sequence[str] = (),
    *,
    sort: bool = False,
    range: Sequence[float] = (),
    unsupported: bool = False,
) -> Figure:
    """Several measures side by side; without a list, those of `overview_measures` that the run has.

    Colours go over the range that a measure declares, or over `range`. Sites of which no head has a value are
    left out. With `unsupported` functions that lack evidence are there too, in brackets.
    """
    chosen = [run.require(name) for name in measure] if measure else heads_overview(run)
    limits = parse_range(range)
    by_measure = [_panels(run, name, sort=sort, limits=limits, unsupported=unsupported) for name in chosen]
    panels = [panel for maps in by_measure for panel in maps]
    starts = accumulate((len(maps) for maps in by_measure), initial=0)
    breaks = frozenset(starts if max(map(len, by_measure)) > 1 else ())
    laid = flow([panel.size for panel in panels], widest(WIDEST), gap=(0.2, 0.12), breaks=breaks)
    functions = [mark for panel in panels for mark in panel.grid.marks]
    entries = legend_entries(functions, boxed=False) + _blank_entry([panel.grid for panel in panels])
    legend = Legend.plan(entries, widest(max(laid.width, 4.6)))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title="Attention heads: " + ", ".join(measure_of(name).words for name in chosen),
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    for panel, corner in zip(panels, laid.corners, strict=True):
        _draw(page, panel, corner, sort=sort)
    legend.draw(page, laid.height)
    return page.finished()


def heads_overview(run: Study) -> list[str]:
    """The standard measures that the run has; ConfigError when it has none at all."""
    measures = [measure for measure in overview_measures() if measure in run.measures] or run.measures[:1]
    if not measures:
        raise ConfigError(f"run {run.name} has no measure to draw; analyse again without --only or --skip")
    return measures


def _panels(run: Study, measure: str, *, sort: bool, limits: Normalize | None, unsupported: bool) -> list[HeadMapPanel]:
    shown = measure_of(measure)
    every = grids_of(run, measure, sort=sort, unsupported=unsupported)
    grids = [grid for grid in every if np.isfinite(grid.values).any()] or every
    values = tuple(grid.values for grid in grids)
    norm = limits or measure_limits(shown, values)
    lines = min(max((grid.busiest for grid in grids), default=0), LINES) + sort
    return [
        HeadMapPanel(grid, shown, norm, grid is grids[-1], cell_size(grid.heads.shape[1], lines=lines), values)
        for grid in grids
    ]


def _draw(page: Page, panel: HeadMapPanel, corner: tuple[float, float], *, sort: bool) -> None:
    layers, slots = panel.grid.heads.shape
    cell = panel.cell
    left, top = corner[0] + LEFT, corner[1] + ABOVE
    width, height = slots * cell[0], layers * cell[1]
    axes = page.axes(left, top, width, height)
    draw_blanks(axes, panel.grid)
    shades = draw_cells(axes, panel.grid.values, cmap=panel.measure.cmap, norm=panel.norm)
    draw_marks(axes, panel.grid, shades, cell=cell, numbers=sort)
    xlabel = "head"
    if sort:
        full = "heads of the layer, highest first"
        xlabel = full if text_width(full, LABEL) <= width else "rank"
    label_grid(axes, panel.grid, title=panel.title, cell=cell[0], xlabel=xlabel, first=int(sort))
    if panel.bar:
        bar = ScalarMappable(panel.norm, panel.measure.cmap)
        unit = panel.measure.unit
        at = left + panel.reach + 0.1
        page.color_bar(at, top, height, bar, label=panel.measure.label, unit=unit, values=panel.all_values)


def _blank_entry(grids: Sequence[Grid]) -> list[tuple[str, str, str]]:
    return [("///", "", "no such head in this layer")] if any(grid.ragged for grid in grids) else []


HEADS = PlotFigure(
    "heads",
    "Layers × heads maps of measures, with the functions of the heads; also of the MHR fork's confidence files.",
    heads_figure,
    Options=HeadsOptions,
    source=replace(
        RUNS, metavar="RUN|PICKLE", help="Directories of runs, pickles of runs, or pickles that the MHR fork wrote."
    ),
    from_pickle="headscope.report.readers.fork:confidence_run",
    every_run=True,
    order=10,
)
