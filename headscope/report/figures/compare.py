"""Two runs and one measure: both maps on one scale, their difference, and head against head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.report.figures.headmap import WIDEST
from headscope.report.layout.grid import (
    ABOVE,
    BELOW,
    LEFT,
    Grid,
    cell_size,
    centred_limits,
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
from headscope.report.layout.page import BAR, GREY, LABEL, Page, flow, shorten, text_width
from headscope.report.registry import RUN, PlotFigure
from headscope.results.study import Study

SMALL, LARGE = 1.9, 3.2  # inches of a scatter, which is otherwise as high as its maps
QUANTILES = 101


@dataclass(frozen=True)
class CompareOptions:
    """Options of the figure."""

    measure: str = option("confidence", "Column of heads.csv.", metavar="NAME")
    range: tuple[float, ...] = option(
        (), "Range of the scale, such as 0,1; default: that of the measure.", metavar="LOW,HIGH"
    )


@dataclass(frozen=True)
class Map:
    """One map of the comparison."""

    grid: Grid
    title: str
    cmap: str
    norm: Normalize
    marks: bool

    @property
    def size(self) -> tuple[float, float]:
        """Inches with labels and colour bar."""
        layers, slots = self.grid.heads.shape
        return LEFT + self.reach + BAR, ABOVE + layers * cell_size(slots)[1] + BELOW

    @property
    def reach(self) -> float:
        """Inches of the map, or of its title where that is longer: the colour bar stands beyond both."""
        slots: int = self.grid.heads.shape[1]
        title = min(text_width(self.title, LABEL, weight="bold"), widest(WIDEST, besides=LEFT + BAR + 0.1))
        return max(slots * cell_size(slots)[0], title)


@dataclass(frozen=True)
class Scatter:
    """Head against head where the layouts agree, else quantile against quantile."""

    site: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    paired: bool
    side: float

    @property
    def size(self) -> tuple[float, float]:
        """Inches with labels."""
        return LEFT + 0.1 + self.side, ABOVE + self.side + BELOW


def compare_figure(run_a: Study, run_b: Study, measure: str = "confidence", *, range: Sequence[float] = ()) -> Figure:
    """Site by site: run A, run B, B − A where the layouts agree, and a scatter.

    Both maps go over the range that the measure declares, or over `range`.
    """
    for run in (run_a, run_b):
        run.require(measure)
    limits = parse_range(range) or measure_limits(
        measure_of(measure), [grid.values for run in (run_a, run_b) for grid in grids_of(run, measure)]
    )
    parts, breaks = _parts(run_a, run_b, measure, limits)
    laid = flow([part.size for part in parts], widest(WIDEST), gap=(0.25, 0.15), breaks=frozenset(breaks))
    marks = [mark for part in parts if isinstance(part, Map) and part.marks for mark in part.grid.marks]
    legend = Legend.plan(legend_entries(marks, boxed=False), widest(max(laid.width, 4.6)))
    names = _names(run_a, run_b)
    page = Page(
        laid.width,
        laid.height + legend.height,
        title=f"Two runs: {measure_of(measure).words} per head",
        subtitle=f"A {names[0]}: {run_a.model} · {run_a.data}\nB {names[1]}: {run_b.model} · {run_b.data}",
        footer=f"A {run_a.signature}\nB {run_b.signature}",
    )
    for part, corner in zip(parts, laid.corners, strict=True):
        if isinstance(part, Map):
            _draw_map(page, part, corner, label=measure_of(measure).label)
        else:
            _draw_scatter(page, part, corner, limits, measure_of(measure).words)
    legend.draw(page, laid.height)
    return page.finished()


def _parts(run_a: Study, run_b: Study, measure: str, norm: Normalize) -> tuple[list[Map | Scatter], list[int]]:
    """The maps and scatters in order, and where each site starts.

    Sites that have no value in either run, or no head in one of them, are left out.
    """
    cmap = measure_of(measure).cmap
    sides = [{grid.site: grid for grid in grids_of(run, measure) if grid.values.size} for run in (run_a, run_b)]
    pairs = [(site, sides[0][site], sides[1][site]) for site in sides[0] if site in sides[1]]
    if not pairs:
        raise ConfigError(
            f"runs {run_a.name} and {run_b.name} share no site: {', '.join(sides[0])} and {', '.join(sides[1])}"
        )
    valued = [pair for pair in pairs if any(np.isfinite(grid.values).any() for grid in pair[1:])]
    pairs = valued or pairs
    agree = {site: run_a.layout[site] == run_b.layout[site] for site, _, _ in pairs}
    differences = [_difference(a, b) for site, a, b in pairs if agree[site]]
    around = centred_limits([grid.values for grid in differences])
    parts: list[Map | Scatter] = []
    breaks = []
    for site, a, b in pairs:
        breaks.append(len(parts))
        parts += [Map(grid, f"{side} · {site}", cmap, norm, True) for side, grid in (("A", a), ("B", b))]
        if agree[site]:
            parts.append(Map(_difference(a, b), f"B − A · {site}", "RdBu_r", around, False))
        parts.append(_scatter(site, a, b, paired=agree[site]))
    return parts, breaks


def _difference(a: Grid, b: Grid) -> Grid:
    return Grid(a.site, b.values - a.values, a.heads, [[()] * len(row) for row in a.functions])


def _scatter(site: str, a: Grid, b: Grid, *, paired: bool) -> Scatter:
    x, y = a.values.ravel(), b.values.ravel()
    side = min(max(len(a.values) * cell_size(a.values.shape[1])[1], SMALL), LARGE)
    if paired:
        finite = np.isfinite(x) & np.isfinite(y)
        return Scatter(site, x[finite], y[finite], True, side)
    steps = np.linspace(0, 1, QUANTILES)
    x, y = (np.quantile(side[np.isfinite(side)], steps) if np.isfinite(side).any() else side[:0] for side in (x, y))
    return Scatter(site, x, y, False, side)


def _draw_map(page: Page, part: Map, corner: tuple[float, float], *, label: str) -> None:
    layers, slots = part.grid.heads.shape
    cell = cell_size(slots)
    left, top = corner[0] + LEFT, corner[1] + ABOVE
    axes = page.axes(left, top, slots * cell[0], layers * cell[1])
    draw_blanks(axes, part.grid)
    shades = draw_cells(axes, part.grid.values, cmap=part.cmap, norm=part.norm)
    if part.marks:
        draw_marks(axes, part.grid, shades, cell=cell)
    label_grid(axes, part.grid, title=shorten(part.title, part.reach, LABEL, weight="bold"), cell=cell[0])
    bar = ScalarMappable(part.norm, part.cmap)
    name = label if part.marks else f"difference in {label}"
    page.color_bar(left + part.reach + 0.1, top, layers * cell[1], bar, label=name, values=[part.grid.values])


def _draw_scatter(page: Page, part: Scatter, corner: tuple[float, float], limits: Normalize, words: str) -> None:
    axes = page.axes(corner[0] + LEFT + 0.1, corner[1] + ABOVE, part.side, part.side)
    low, high = float(limits.vmin or 0), float(limits.vmax or 0)
    edge = (high - low) * 0.05
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.6, zorder=1)
    axes.scatter(part.x, part.y, s=9, color="#0072b2", alpha=0.65, linewidths=0, zorder=2)
    axes.set(xlim=(low - edge, high + edge), ylim=(low - edge, high + edge))
    axes.locator_params(nbins=5)
    axes.tick_params(length=2, width=0.4)
    words = shorten(words, part.side - 0.2, LABEL)
    axes.set_xlabel(f"A: {words}", size=LABEL, labelpad=1.5)
    axes.set_ylabel(f"B: {words}", size=LABEL, labelpad=2)
    axes.set_title(_scatter_title(part), size=LABEL, loc="left", pad=3, weight="bold")


def _scatter_title(part: Scatter) -> str:
    if not part.paired:
        return "percentiles (layouts differ)"
    if len(part.x) < 3 or np.ptp(part.x) == 0 or np.ptp(part.y) == 0:
        return "head against head"
    return f"head against head, r = {np.corrcoef(part.x, part.y)[0, 1]:.2f}".replace("-", "−")


def _names(*runs: Study) -> Sequence[str]:
    return [shorten(run.name, 2.0, LABEL) for run in runs]


COMPARE = PlotFigure(
    "compare",
    "Two runs side by side: both maps, their difference, and head against head.",
    compare_figure,
    Options=CompareOptions,
    source=RUN,
    runs=2,
    order=300,
)
