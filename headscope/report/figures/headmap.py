"""Layers × heads maps of measures with function marks, after figure 1 of Voita et al. 2019."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.engine.declarations import Measure, measure_of, overview_measures
from headscope.errors import ConfigError
from headscope.report.layout.families import Legend, legend_entries
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
    shared_limits,
)
from headscope.report.layout.page import BAR, LABEL, Page, flow, text_width
from headscope.report.readers.run import AnalysisRun

WIDEST = 14.5  # inches: more panels than fit start a new line
LINES = 3  # functions that a cell writes out at most


@dataclass(frozen=True)
class HeadMapPanel:
    """One grid with its scale; `bar` where the colour bar of the measure stands."""

    grid: Grid
    measure: Measure
    norm: Normalize
    bar: bool
    cell: tuple[float, float]

    @property
    def size(self) -> tuple[float, float]:
        """Inches with labels and colour bar."""
        layers = len(self.grid.heads)
        return LEFT + self.reach + (BAR if self.bar else 0), ABOVE + layers * self.cell[1] + BELOW

    @property
    def reach(self) -> float:
        """Inches of the map, or of its title where that is longer: the colour bar stands beyond both."""
        title = text_width(self.title, LABEL, weight="bold")
        slots: int = self.grid.heads.shape[1]
        return max(slots * self.cell[0], title)

    @property
    def title(self) -> str:
        """Measure and site."""
        return f"{self.measure.words} · {self.grid.site}"


def head_map(run: AnalysisRun, measure: str, *, sort: bool = False, marks: bool = True) -> Figure:
    """One measure over all heads, one panel a site, on one colour scale."""
    return heads_figure(run, [measure], sort=sort, marks=marks)


def heads_figure(
    run: AnalysisRun, measures: Sequence[str] | None = None, *, sort: bool = False, marks: bool = True
) -> Figure:
    """Several measures side by side; without a list, those of `overview_measures` that the run has."""
    chosen = [run.require(measure) for measure in measures] if measures else heads_overview(run)
    panels = [panel for measure in chosen for panel in _panels(run, measure, sort=sort)]
    sites = len(run.layout)
    breaks = frozenset(range(0, len(panels), sites)) if sites > 1 else frozenset[int]()
    laid = flow([panel.size for panel in panels], WIDEST, gap=(0.2, 0.12), breaks=breaks)
    functions = [mark for panel in panels for mark in panel.grid.marks] if marks else []
    entries = legend_entries(functions, boxed=False) + _blank_entry([panel.grid for panel in panels])
    legend = Legend.plan(entries, max(laid.width, 4.6))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title="Attention heads: " + ", ".join(measure_of(name).words for name in chosen),
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    for panel, corner in zip(panels, laid.corners, strict=True):
        _draw(page, panel, corner, sort=sort, marks=marks)
    legend.draw(page, laid.height)
    return page.figure


def heads_overview(run: AnalysisRun) -> list[str]:
    """The standard measures that the run has; ConfigError when it has none at all."""
    measures = [measure for measure in overview_measures() if measure in run.measures] or run.measures[:1]
    if not measures:
        raise ConfigError(f"run {run.name} has no measure to draw; analyse again without --only or --skip")
    return measures


def measure_limits(measure: Measure, arrays: Sequence[NDArray[np.float64]]) -> Normalize:
    """The range that a measure declares, its open ends at the smallest and the largest of all values.

    Where all values lie beyond the end that it declares, their own range.
    """
    limits = shared_limits(arrays)
    low, high = measure.range
    declared = Normalize(limits.vmin if low is None else low, limits.vmax if high is None else high)
    return declared if (declared.vmin or 0) < (declared.vmax or 0) else limits


def _panels(run: AnalysisRun, measure: str, *, sort: bool) -> list[HeadMapPanel]:
    grids, shown = grids_of(run, measure, sort=sort), measure_of(measure)
    norm = measure_limits(shown, [grid.values for grid in grids])
    lines = min(max((grid.busiest for grid in grids), default=0), LINES) + sort
    return [
        HeadMapPanel(grid, shown, norm, bar=grid is grids[-1], cell=cell_size(grid.heads.shape[1], lines=lines))
        for grid in grids
    ]


def _draw(page: Page, panel: HeadMapPanel, corner: tuple[float, float], *, sort: bool, marks: bool) -> None:
    layers, slots = panel.grid.heads.shape
    cell = panel.cell
    left, top = corner[0] + LEFT, corner[1] + ABOVE
    width, height = slots * cell[0], layers * cell[1]
    axes = page.axes(left, top, width, height)
    draw_blanks(axes, panel.grid)
    shades = draw_cells(axes, panel.grid.values, cmap=panel.measure.cmap, norm=panel.norm)
    if marks or sort:
        draw_marks(axes, panel.grid, shades, cell=cell, numbers=sort)
    xlabel = "head"
    if sort:
        full = "heads of the layer, highest first"
        xlabel = full if text_width(full, LABEL) <= width else "rank"
    label_grid(axes, panel.grid, title=panel.title, xlabel=xlabel, first=int(sort))
    if panel.bar:
        bar = ScalarMappable(panel.norm, panel.measure.cmap)
        unit = panel.measure.unit
        page.color_bar(left + panel.reach + 0.1, top, height, bar, label=panel.measure.label, unit=unit)


def _blank_entry(grids: Sequence[Grid]) -> list[tuple[str, str, str]]:
    return [("///", "", "no such head in this layer")] if any(grid.ragged for grid in grids) else []
