"""Layers × heads maps: measures with marks of functions (figure 1 of Voita et al. 2019), functions, and two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, to_hex, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from headscope.config import option
from headscope.config.declarations import head_functions, measure_of, measured_columns
from headscope.description.features import leading_group
from headscope.errors import ConfigError, flag
from headscope.report import charts
from headscope.report.charts import Grid, draw_grid, grid_entries, grids_of
from headscope.report.comparison import StudyComparison, compared_measure
from headscope.report.figures.layers import PARTS
from headscope.report.marks import contrast
from headscope.report.registry import RANGE, RUN, RUNS, PlotFigure
from headscope.report.sheet import BAR, BESIDE, GREY, PALE, Sheet, swatch
from headscope.results.study import Study
from headscope.results.study_answers import importance_label, main_importance

LINES, BANDS = 3, 4  # functions of one head that are written out at most, as text and as bands
COUNTS, SCATTER = 14.0, 20.0  # ems of the bars beside a map, and of a side of a scatter
SHADE = 0.38  # opacity of the colour of an explanation
SEVERAL, SEVERAL_COLOR = "several functions", "#555555"
Grounds = Mapping[tuple[int, int], tuple[str, str]]
"""By layer and head: what explains most of a head that has no function, in words, and its colour."""


@dataclass(frozen=True)
class HeadsOptions:
    """Options of the figure."""

    measure: tuple[str, ...] = option(
        (), "Column of heads.csv; repeat it for several maps.", metavar="NAME", repeat=True
    )
    sort: bool = option(False, "Sort the heads of each layer by the measure.")
    range: tuple[float, ...] = option((), RANGE, metavar="LOW,HIGH")


def draw_heads(run: Study, sheet: Sheet, options: HeadsOptions) -> None:
    """A grid for every measure and site; colours cover the range that the measure declares, or `range`."""
    measures = [run.require(name) for name in options.measure] if options.measure else shown_measures(run)
    by_measure = {name: grids_with_values(grids_of(run, name, sort=options.sort)) for name in measures}
    grids = [grid for of_measure in by_measure.values() for grid in of_measure]
    lines = min(max(grid.max_functions for grid in grids), LINES) + options.sort
    titles = [f"{measure_of(name).words} · {grid.site}" for name in by_measure for grid in by_measure[name]]
    starts = {*map(int, np.cumsum([len(of_measure) for of_measure in by_measure.values()]))}
    has_sites, sizes = min(starts) > 1, [grid.size(lines) for grid in grids]
    layout: dict[str, Any] = {"starts": starts, "bar": True} if has_sites else {"beside": BESIDE + BAR}
    panels = iter(sheet.panels(titles, sizes, share="", **layout))
    for name, of_measure in by_measure.items():
        measure, values = measure_of(name), [grid.values for grid in of_measure]
        row_panels = [next(panels) for _ in of_measure]
        norm = charts.measure_limits(measure, values, options.range)
        for axes, grid in zip(row_panels, of_measure, strict=True):
            shades = draw_grid(sheet, axes, grid, cmap=measure.cmap, norm=norm, lines=lines, ranks=options.sort)
        sheet.scale(shades, row_panels, importance_label(run, measure), values)
    sheet.key(*grid_entries(grids))
    words = ", ".join(measure_of(name).words for name in measures)
    sheet.headline(f"Attention heads: {words}", f"{run.model} · {run.data}")


def grids_with_values(grids: list[Grid]) -> list[Grid]:
    """The grids in which some head has a value; all of them if none has."""
    return [grid for grid in grids if np.isfinite(grid.values).any()] or grids


def shown_measures(run: Study) -> list[str]:
    """The importance that says which heads matter, else the standard measures; ConfigError where there are none."""
    main = main_importance(run)
    if main and main.name in run.measures:
        return [main.name]
    overview = sorted((measure.overview, name) for name, (_, measure) in measured_columns().items() if measure.overview)
    measures = [name for _, name in overview if name in run.measures] or run.measures[:1]
    if not measures:
        raise ConfigError(f"run {run.name} has no measure to draw; analyse again without {flag.only} or {flag.skip}")
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


def draw_functions(run: Study, sheet: Sheet, _: object) -> None:
    """A cell per head, a coloured band per function; beside it the heads per layer by function, each counted once."""
    all_grids = grids_of(run)
    grids = [grid for grid in all_grids if grid.heads.size] or all_grids
    lines = min(max(grid.max_functions for grid in grids), BANDS)
    counts = COUNTS if sheet.style.width is None or sheet.style.width > 5 else COUNTS / 2
    sizes = [size for wide, tall in (grid.size(lines) for grid in grids) for size in ((wide, tall), (counts, tall))]
    panels = sheet.panels([title for grid in grids for title in (grid.site, "")], sizes, group=2, share="")
    shades: dict[str, str] = {}
    for axes, bars, grid in zip(panels[::2], panels[1::2], grids, strict=True):
        grounds = _grounds(run, grid)
        shades |= dict(grounds.values())
        draw_grid(sheet, axes, grid, lines=lines, marks=False)
        for (layer, slot), (_, color) in grounds.items():
            axes.add_patch(Rectangle((slot, layer), 1, 1, facecolor=color, edgecolor="white"))
        sheet.after_layout.append(partial(_draw_bands, axes, grid))
        _draw_counts(bars, grid)
        bars.set_ylim(axes.get_ylim())
    longest = max([1.0, *(bars.dataLim.x1 for bars in panels[1::2])])
    for bars in panels[1::2]:
        bars.set_xlim(0, longest)
    words = [word for word, _ in PARTS.values() if word in shades]
    entries = [swatch(shades[word], f"no function found; mostly explained by {word}") for word in words]
    none = swatch(PALE, "no function found" + ", less than half explained" * bool(shades))
    sheet.key(*grid_entries(grids, *entries, none, with_colors=True))
    sheet.headline("Functions of attention heads", f"{run.model} · {run.data}")


def _grounds(run: Study, grid: Grid) -> Grounds:
    """The main explanation of each head that has no function and is explained by half at least."""
    colors = {}
    for row in run.heads[run.heads["site"] == grid.site].to_dict("records"):
        layer, head = int(row["layer"]), int(row["head"])
        if (group := leading_group(row)) and not grid.functions[layer][head]:
            word, color = PARTS[group]
            red, green, blue = (SHADE * part + 1 - SHADE for part in to_rgb(color))
            colors[layer, head] = word, to_hex((red, green, blue))
    return colors


def _draw_bands(axes: Axes, grid: Grid) -> None:
    width, size = charts.cell_inches(axes)[0] * 0.95, rcParams["xtick.labelsize"]
    looks = {"size": size, "ha": "center", "va": "center_baseline"}
    cells = [(slot, layer, cell) for layer, row in enumerate(grid.functions) for slot, cell in enumerate(row)]
    for x, y, functions in cells:
        lines = charts.cell_lines(functions, width, room=BANDS)
        bands = max(len(lines), 1)
        for number, (function, line) in enumerate(zip(functions, lines, strict=False)):
            top, color = y + number / bands, function.family.color
            axes.add_patch(Rectangle((x, top), 1, 1 / bands, facecolor=color, edgecolor="white"))
            axes.text(x + 0.5, top + 0.5 / bands, line, color=contrast(color), **looks)


def _draw_counts(axes: Axes, grid: Grid) -> None:
    """Draw stacked bars beside the rows of the map; labels begin with "_" as the legend has the map's colours."""
    rows = [[{function.family for function in cell} for cell in row] for row in grid.functions]
    families = {family for row in rows for cell in row for family in cell}
    all_families = list(head_functions().values())
    order = sorted(
        families,
        key=lambda family: (all_families.index(family) if family in all_families else len(all_families), family.name),
    )
    parts = {f"_{family.name}": (family.color, [row.count({family}) for row in rows]) for family in order}
    parts[SEVERAL] = SEVERAL_COLOR, [sum(len(cell) > 1 for cell in row) for row in rows]
    charts.draw_bars(axes, np.arange(len(rows)) + 0.5, parts, width=0.62, horizontal=True)
    axes.set(yticks=[], xlabel="heads")
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.spines["bottom"].set_visible(False)


FUNCTIONS = PlotFigure(
    "functions",
    "Which function each head has, and how many heads of each layer have it.",
    draw_functions,
    every_run=True,
    order=20,
)


@dataclass(frozen=True)
class CompareOptions:
    """Options of the figure."""

    measure: str = option(
        "", "Column of heads.csv; default: which heads matter if both runs say it, else confidence.", metavar="NAME"
    )
    range: tuple[float, ...] = option((), RANGE, metavar="LOW,HIGH")


def draw_comparison(runs: Sequence[Study], sheet: Sheet, options: CompareOptions) -> None:
    """For each site run A and run B; if their layouts agree also B − A and a scatter plot."""
    first, second = runs
    column = first.require(second.require(options.measure or compared_measure(first, second) or "confidence"))
    measure = measure_of(column)
    a_grids, b_grids = ({grid.site: grid for grid in grids_of(run, column) if grid.values.size} for run in runs)
    shared = [(a_grids[site], b_grids[site]) for site in a_grids if site in b_grids]
    if not shared:
        sites = f"{', '.join(a_grids)} and {', '.join(b_grids)}"
        raise ConfigError(f"runs {first.name} and {second.name} share no site: {sites}")
    pairs = [pair for pair in shared if any(np.isfinite(grid.values).any() for grid in pair)] or shared
    grids = [grid for pair in pairs for grid in pair]
    norm = charts.measure_limits(measure, [grid.values for grid in grids], options.range)
    differences = {
        a.site: replace(b, values=b.values - a.values)
        for a, b in pairs
        if first.layout[a.site] == second.layout[a.site]
    }
    around = charts.value_limits([grid.values for grid in differences.values()], symmetric=True)
    titles, sizes, starts = list[str](), list[tuple[float, float]](), set[int]()
    for a, b in pairs:
        starts.add(len(titles))
        titles += [f"A · {a.site}", f"B · {b.site}"]
        sizes += [a.size(), b.size()]
        if a.site in differences:
            titles += [f"B − A · {a.site}", ""]
            sizes += [b.size(), (SCATTER, max(a.size()[1], 15.0))]
    panels = iter(sheet.panels(titles, sizes, starts=starts, beside=BESIDE + BAR, share=""))
    for a, b in pairs:
        for grid in (a, b):
            axes = next(panels)
            shades = draw_grid(sheet, axes, grid, cmap=measure.cmap, norm=norm)
            sheet.scale(shades, [axes], importance_label(first, measure), [grid.values])
        if a.site in differences:
            axes = next(panels)
            shades = draw_grid(sheet, axes, differences[a.site], cmap="RdBu_r", norm=around, marks=False)
            sheet.scale(shades, [axes], f"difference: {importance_label(first, measure)}")
            axes = next(panels)
            sheet.name_panel(axes, _draw_scatter(axes, a, b, norm))
    sheet.key(*grid_entries(grids))
    names = (f"{side} {run.name}: {run.model} · {run.data}" for side, run in zip("AB", runs, strict=True))
    sheet.headline(f"Two runs: {measure.words} per head", "\n".join(names))


def _draw_scatter(axes: Axes, a: Grid, b: Grid, limits: Normalize) -> str:
    """Draw a scatter plot of heads in A and B; returns its title, with the correlation."""
    in_both = np.isfinite(a.values) & np.isfinite(b.values)
    x, y = a.values[in_both], b.values[in_both]
    title = "head against head"
    if len(x) >= 3 and np.ptp(x) and np.ptp(y):
        title += f", r = {np.corrcoef(x, y)[0, 1]:.2f}".replace("-", "−")
    low, high = float(limits.vmin or 0), float(limits.vmax or 0)
    ends = low - (high - low) * 0.05, high + (high - low) * 0.05
    axes.plot([low, high], [low, high], color=GREY, linewidth=0.6, zorder=1)
    axes.scatter(x, y, s=9, color="#0072b2", alpha=0.65, linewidths=0, zorder=2)
    axes.set(xlim=ends, ylim=ends, xlabel="A", ylabel="B")
    axes.locator_params(nbins=5)
    return title


def compare(runs: Sequence[Study], options: CompareOptions) -> StudyComparison:
    """What the command `plot compare` prints."""
    return StudyComparison(runs, measure=options.measure)


COMPARE = PlotFigure(
    "compare",
    "Two runs side by side: both maps, their difference, and head against head.",
    draw_comparison,
    Options=CompareOptions,
    source=RUN,
    runs=2,
    answers="headscope.report.figures.maps:compare",
    order=300,
)
