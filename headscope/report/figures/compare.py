"""Two runs and one measure: both maps on one scale, their difference, and head against head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.report.charts import centred_limits, measure_limits
from headscope.report.comparison import StudyComparison, compared_measure
from headscope.report.grid import Grid, blank_entries, draw_grid, grids_of
from headscope.report.marks import function_entries
from headscope.report.registry import RUN, PlotFigure
from headscope.report.sheet import BAR, BESIDE, GREY, Sheet
from headscope.results.study import Study
from headscope.results.study_answers import importance_label

SCATTER = 20.0  # ems of a side
QUANTILES = 101


@dataclass(frozen=True)
class CompareOptions:
    """Options of the figure."""

    measure: str = option(
        "", "Column of heads.csv; default: which heads matter if both runs say it, else confidence.", metavar="NAME"
    )
    range: tuple[float, ...] = option(
        (), "Range of the scale, such as 0,1; default: that of the measure.", metavar="LOW,HIGH"
    )


def draw_comparison(runs: Sequence[Study], sheet: Sheet, options: CompareOptions) -> None:
    """Site by site: run A, run B, B − A where the layouts agree, and a scatter.

    Both maps go over the range that the measure declares, or over `range`. Sites that have no value in either run, or
    no head in one of them, are left out.
    """
    first, second = runs
    column = first.require(second.require(options.measure or compared_measure(first, second) or "confidence"))
    measure, pairs = measure_of(column), _pairs(first, second, column)
    norm = measure_limits(measure, [grid.values for pair in pairs for grid in pair], options.range)
    differences = {
        a.site: replace(b, values=b.values - a.values)
        for a, b in pairs
        if first.layout[a.site] == second.layout[a.site]
    }
    around = centred_limits([grid.values for grid in differences.values()])
    titles, sizes, starts = list[str](), list[tuple[float, float]](), set[int]()
    for a, b in pairs:
        starts.add(len(titles))
        maps = [("A", a), ("B", b), *([("B − A", differences[a.site])] if a.site in differences else [])]
        titles += [*(f"{name} · {grid.site}" for name, grid in maps), ""]
        sizes += [*(grid.size() for _, grid in maps), (SCATTER, max(a.size()[1], 15.0))]
    panels = iter(sheet.panels(titles, sizes, starts=starts, beside=BESIDE + BAR, share=""))
    for a, b in pairs:
        for grid in (a, b):
            axes = next(panels)
            shades = draw_grid(sheet, axes, grid, cmap=measure.cmap, norm=norm)
            sheet.scale(shades, [axes], importance_label(first, measure), [grid.values])
        if a.site in differences:
            axes = next(panels)
            shades = draw_grid(sheet, axes, differences[a.site], cmap="RdBu_r", norm=around, marks=False)
            sheet.scale(shades, [axes], f"difference in {measure.label}")
        axes = next(panels)
        sheet.name_panel(axes, _draw_scatter(axes, a, b, norm, paired=a.site in differences))
    grids = [grid for pair in pairs for grid in pair]
    sheet.key(*function_entries([mark for grid in grids for mark in grid.marks], colored=False), *blank_entries(grids))
    names = (f"{side} {run.name}: {run.model} · {run.data}" for side, run in zip("AB", runs, strict=True))
    sheet.headline(f"Two runs: {measure.words} per head", "\n".join(names))


def _pairs(first: Study, second: Study, measure: str) -> list[tuple[Grid, Grid]]:
    one, other = ({grid.site: grid for grid in grids_of(run, measure) if grid.values.size} for run in (first, second))
    pairs = [(one[site], other[site]) for site in one if site in other]
    if not pairs:
        raise ConfigError(f"runs {first.name} and {second.name} share no site: {', '.join(one)} and {', '.join(other)}")
    return [pair for pair in pairs if any(np.isfinite(grid.values).any() for grid in pair)] or pairs


def _draw_scatter(axes: Axes, a: Grid, b: Grid, limits: Normalize, *, paired: bool) -> str:
    """Head against head where the layouts agree, else percentile against percentile; which of them, as a title."""
    x, y = a.values.ravel(), b.values.ravel()
    title = "head against head" if paired else "percentiles (layouts differ)"
    if paired:
        known = np.isfinite(x) & np.isfinite(y)
        x, y = x[known], y[known]
        if len(x) >= 3 and np.ptp(x) and np.ptp(y):
            title += f", r = {np.corrcoef(x, y)[0, 1]:.2f}".replace("-", "−")
    else:
        steps = np.linspace(0, 1, QUANTILES)
        x, y = (np.nanquantile(side, steps) if np.isfinite(side).any() else steps * np.nan for side in (x, y))
    low, high = float(limits.vmin or 0), float(limits.vmax or 0)
    ends = low - (high - low) * 0.05, high + (high - low) * 0.05
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.6, zorder=1)
    axes.scatter(x, y, s=9, color="#0072b2", alpha=0.65, linewidths=0, zorder=2)
    axes.set(xlim=ends, ylim=ends, xlabel="A", ylabel="B")
    axes.locator_params(nbins=5)
    return title


def compare(runs: Sequence[Study], options: CompareOptions) -> StudyComparison:
    """What the figure's command says."""
    return StudyComparison(runs, measure=options.measure)


COMPARE = PlotFigure(
    "compare",
    "Two runs side by side: both maps, their difference, and head against head.",
    draw_comparison,
    Options=CompareOptions,
    source=RUN,
    runs=2,
    answers="headscope.report.figures.compare:compare",
    order=300,
)
