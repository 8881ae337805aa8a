"""Which function each head has, and how many heads of a layer have each function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from headscope.config import option
from headscope.config.declarations import head_functions
from headscope.description.sentences import leading_group
from headscope.report.charts import draw_bars
from headscope.report.figures.explained import PARTS
from headscope.report.grid import Grid, blank_entries, cell_inches, draw_grid, grids_of
from headscope.report.marks import Function, contrast, fit, function_entries
from headscope.report.registry import PlotFigure
from headscope.report.sheet import PALE, Sheet, swatch
from headscope.results.study import Study

COUNTS = 14.0
"""Ems of the bars beside a map."""
SHADE = 0.38  # of the colour of what explains a head without a function
MOST = 4  # functions of one head that are all written; more are counted
SEVERAL, SEVERAL_COLOR = "several functions", "#555555"
Grounds = Mapping[tuple[int, int], tuple[str, str]]
"""By layer and head what explains most of a head, in words, and its shade."""


@dataclass(frozen=True)
class FunctionsOptions:
    """Options of the figure."""

    unsupported: bool = option(False, "Also draw functions that lack evidence, hollow; they count in no bar.")


def draw_functions(run: Study, sheet: Sheet, options: FunctionsOptions) -> None:
    """A cell per head, a coloured band per function; beside it the heads per layer by function, each counted once.

    Of a run with `explained` heads without a function have the shade of what explains most of them. With `unsupported`
    functions that lack evidence have hollow bands; the bars do not count them. Sites without heads are left out.
    """
    every = grids_of(run, unsupported=options.unsupported)
    grids = [grid for grid in every if grid.heads.size] or every
    lines = min(max(grid.busiest for grid in grids), MOST)
    counts = COUNTS if sheet.style.width is None or sheet.style.width > 5 else COUNTS / 2
    sizes = [grid.size(lines) for grid in grids]
    panels = sheet.panels(
        [title for grid in grids for title in (grid.site, "")],
        [size for wide, tall in sizes for size in ((wide, tall), (counts, tall))],
        group=2,
        share="",
    )
    found = [_grounds(run, grid) for grid in grids]
    for axes, bars, grid, grounds in zip(panels[::2], panels[1::2], grids, found, strict=True):
        draw_grid(sheet, axes, grid, lines=lines, marks=False)
        sheet.later.append(lambda axes=axes, grid=grid, grounds=grounds: _draw_heads(axes, grid, grounds))  # type: ignore[misc]
        _draw_counts(bars, grid)
        bars.set_ylim(axes.get_ylim())
    longest = max([1.0, *(bars.dataLim.x1 for bars in panels[1::2])])
    for bars in panels[1::2]:
        bars.set_xlim(0, longest)
    shades = dict(shade for grounds in found for shade in grounds.values())
    sheet.key(
        *function_entries((mark for grid in grids for mark in grid.marks), colored=True),
        *(
            swatch(shades[word], f"no function found; mostly explained by {word}")
            for word, _ in PARTS.values()
            if word in shades
        ),
        swatch(PALE, "no function found" + ", less than half explained" * bool(shades)),
        *blank_entries(grids),
    )
    sheet.headline("Functions of attention heads", f"{run.model} · {run.data}")


def _grounds(run: Study, grid: Grid) -> Grounds:
    """Of heads of which a description says at least half, and which have no function with evidence."""
    found = {}
    for row in run.heads[run.heads["site"] == grid.site].to_dict("records"):
        layer, head = int(row["layer"]), int(row["head"])
        if (group := leading_group(row)) and all(function.hollow for function in grid.functions[layer][head]):
            word, color = PARTS[group]
            red, green, blue = (SHADE * part + 1 - SHADE for part in to_rgb(color))
            found[layer, head] = word, to_hex((red, green, blue))
    return found


def _draw_heads(axes: Axes, grid: Grid, grounds: Grounds) -> None:
    for (layer, slot), (_, color) in grounds.items():
        axes.add_patch(Rectangle((slot, layer), 1, 1, facecolor=color, edgecolor="white"))
    for layer, row in enumerate(grid.functions):
        for slot, functions in enumerate(row):
            _draw_bands(axes, slot, layer, functions)


def _draw_bands(axes: Axes, x: int, y: int, functions: Sequence[Function]) -> None:
    shown = functions if len(functions) <= MOST else functions[: MOST - 1]
    bands = max(len(shown) + (len(shown) < len(functions)), 1)
    width, size = cell_inches(axes)[0] * 0.95, rcParams["xtick.labelsize"]
    texts = [(fit(function, width, size), function) for function in shown]
    for number, (text, function) in enumerate(texts):
        top, color = y + number / bands, function.family.color
        if function.hollow:
            inside = (x + 0.06, top + 0.06 / bands), 0.88, 0.88 / bands
            axes.add_patch(Rectangle(*inside, facecolor="white", edgecolor=color))
        else:
            axes.add_patch(Rectangle((x, top), 1, 1 / bands, facecolor=color, edgecolor="white"))
        ink = "black" if function.hollow else contrast(color)
        axes.text(x + 0.5, top + 0.5 / bands, text, size=size, color=ink, ha="center", va="center_baseline")
    if len(shown) < len(functions):
        hidden = f"+{len(functions) - len(shown)}"
        axes.text(x + 0.5, y + 1 - 0.5 / bands, hidden, size=size, ha="center", va="center_baseline")


def _draw_counts(axes: Axes, grid: Grid) -> None:
    """Stacked bars in line with the rows of the map; the key has the colours of the map already."""
    rows = [[{function.family for function in cell if not function.hollow} for cell in row] for row in grid.functions]
    families = {family for row in rows for cell in row for family in cell}
    known = list(head_functions().values())
    order = sorted(families, key=lambda family: (known.index(family) if family in known else len(known), family.name))
    parts = {f"_{family.name}": (family.color, [row.count({family}) for row in rows]) for family in order}
    parts[SEVERAL] = SEVERAL_COLOR, [sum(len(cell) > 1 for cell in row) for row in rows]
    draw_bars(axes, np.arange(len(rows)) + 0.5, parts, width=0.62, level=True)
    axes.set(yticks=[], xlabel="heads")
    axes.xaxis.set_major_locator(MaxNLocator(3, integer=True))
    axes.spines["bottom"].set_visible(False)


FUNCTIONS = PlotFigure(
    "functions",
    "Which function each head has, and how many heads of each layer have it.",
    draw_functions,
    Options=FunctionsOptions,
    every_run=True,
    order=20,
)
