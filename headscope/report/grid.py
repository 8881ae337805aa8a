"""One site's heads as a layers × heads grid: values, head numbers, functions, and its drawing."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.report.charts import Array, draw_cells, number_cells
from headscope.report.marks import Function, contrast, fit, functions_of
from headscope.report.sheet import PALE, RULE, Sheet, swatch, text_width
from headscope.results.study import Study

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

MISSING = "////"
"""Hatch of places where a layer has no such head."""
CELL = (4.0, 3.0)
"""Ems of a head."""
LEADING = 1.25


@dataclass(frozen=True)
class Grid:
    """Row per layer, slot per head; `heads` is −1 in slots that a layer does not have."""

    site: str
    values: Array  # [layer slot], NaN where the measure has no value
    heads: NDArray[np.int64]  # [layer slot]
    functions: list[list[tuple[Function, ...]]]

    @property
    def ragged(self) -> bool:
        """Whether some slots are empty."""
        return bool((self.heads < 0).any())

    @property
    def busiest(self) -> int:
        """The largest number of functions that one head has."""
        return max((len(cell) for row in self.functions for cell in row), default=0)

    @property
    def marks(self) -> list[Function]:
        """Every function of every head."""
        return [function for row in self.functions for cell in row for function in cell]

    def size(self, lines: int = 1) -> tuple[float, float]:
        """Ems of the grid where a head has so many lines of marks; large grids have narrower cells."""
        layers, slots = self.heads.shape
        wide = CELL[0] * (1.1 if slots <= 8 else 1.0 if slots <= 12 else 0.85)
        return max(slots, 1) * wide, layers * max(CELL[1], LEADING * lines + 0.4)


def grids_of(run: Study, measure: str | None = None, *, sort: bool = False, unsupported: bool = False) -> list[Grid]:
    """One grid a site; with `sort` the heads of a layer go from the highest value to the lowest.

    With `unsupported` heads also have the functions that lack evidence, hollow.
    """
    grids = [_grid(run, site, counts, measure, unsupported=unsupported) for site, counts in run.layout.items()]
    return [_sorted(grid) for grid in grids] if sort else grids


def _grid(run: Study, site: str, counts: Sequence[int], measure: str | None, *, unsupported: bool) -> Grid:
    slots = max(counts, default=0)
    values = np.full((len(counts), slots), np.nan)
    heads = np.where(np.arange(slots) < np.array(counts)[:, None], np.arange(slots), -1)
    functions: list[list[tuple[Function, ...]]] = [[()] * slots for _ in counts]
    table = run.heads[run.heads["site"] == site]
    numbers = table[measure] if measure else np.full(len(table), np.nan)
    weak = table["functions_unsupported"] if unsupported and "functions_unsupported" in table else [""] * len(table)
    columns = (table["layer"], table["head"], numbers, table["functions"], weak)
    for layer, head, value, labels, hollow in zip(*columns, strict=True):
        values[layer, head] = value
        functions[layer][head] = functions_of(labels) + functions_of(hollow, hollow=True)
    return Grid(site, values, heads, functions)


def _sorted(grid: Grid) -> Grid:
    """Every layer from its highest value to its lowest; heads without a value last, then empty slots."""
    keys = np.where(np.isnan(grid.values), np.inf, -grid.values)
    order = np.lexsort((keys, grid.heads < 0), axis=-1)
    functions = [[row[slot] for slot in ranks] for row, ranks in zip(grid.functions, order, strict=True)]
    values = np.take_along_axis(grid.values, order, axis=1)
    return Grid(grid.site, values, np.take_along_axis(grid.heads, order, axis=1), functions)


def draw_grid(
    sheet: Sheet,
    axes: Axes,
    grid: Grid,
    *,
    cmap: str = "viridis",
    norm: Normalize | None = None,
    lines: int = 1,
    marks: bool = True,
    ranks: bool = False,
) -> ScalarMappable:
    """The grid in a panel; cells have one size in all panels of a sheet that have as many `lines` of marks.

    Slots without a head are hatched, heads without a value grey. Functions stand in their cells (`marks`), with the
    numbers of heads where these are sorted (`ranks`).
    """
    shades = draw_cells(axes, grid.values, cmap=cmap, norm=norm or Normalize(0, 1))
    for layer, slot in zip(*np.nonzero(np.isnan(grid.values)), strict=True):
        looks: dict[str, Any] = {"facecolor": PALE, "edgecolor": "white"}
        if grid.heads[layer, slot] < 0:
            looks = {"facecolor": "white", "edgecolor": RULE, "hatch": MISSING}
        axes.add_patch(Rectangle((slot, layer), 1, 1, linewidth=0 if "hatch" in looks else 0.6, **looks))
    layers, slots = grid.heads.shape
    (wide, tall), (room, height) = grid.size(lines), sheet.sizes[axes]
    axes.set(xlim=(0, max(slots, 1) * room / wide), ylim=(layers * height / tall, 0))
    axes.set(xlabel="rank, highest first" if ranks else "head", ylabel="layer")
    number_cells(axes, x=slots, y=layers, first=int(ranks))
    if marks:
        sheet.later.append(lambda: _write_marks(axes, grid, shades, numbers=ranks))
    return shades


def blank_entries(grids: Sequence[Grid]) -> list[Artist]:
    """What hatched slots are, if there are any."""
    ragged = any(grid.ragged for grid in grids)
    return [swatch("white", "no such head in this layer", hatch="///")] if ragged else []


def _write_marks(axes: Axes, grid: Grid, shades: ScalarMappable, *, numbers: bool) -> None:
    """Functions (and head numbers where they fit) in black or white, whichever the cell's colour allows."""
    size = rcParams["xtick.labelsize"]
    wide, tall = cell_inches(axes)
    room = int(tall / (LEADING * size / 72))
    for layer, row in enumerate(grid.functions):
        for slot, functions in enumerate(row):
            value = grid.values[layer, slot]
            ink = contrast(shades.to_rgba(value)) if np.isfinite(value) else "black"
            lines = cell_lines(functions, wide * 0.95, most=room)
            number = f"h{grid.heads[layer, slot]}"
            if numbers and grid.heads[layer, slot] >= 0 and len(lines) < room and text_width(number, size) < wide:
                lines = [number, *lines]
            if lines:
                text = "\n".join(lines)
                axes.text(
                    slot + 0.5, layer + 0.5, text, size=size, color=ink, ha="center", va="center", linespacing=1.1
                )


def cell_inches(axes: Axes) -> tuple[float, float]:
    """Width and height of a cell of a panel that has its place."""
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return box.width / dpi / abs(right - left), box.height / dpi / abs(top - bottom)


def cell_lines(functions: Sequence[Function], width: float, *, most: int) -> list[str]:
    """A line per function; where there are more than `most`, the last line counts the others."""
    size = rcParams["xtick.labelsize"]
    if len(functions) > most:
        shown = max(most - 1, 0)
        return [*(fit(f, width, size) for f in functions[:shown]), f"+{len(functions) - shown}"]
    return [fit(function, width, size) for function in functions]


def layer_panels(
    sheet: Sheet, run: Study, size: tuple[float, float], layers: Collection[tuple[str, int]], **options: Any
) -> dict[tuple[str, int], Axes]:
    """A panel of a `size` in ems for each of these layers that has heads; each site begins a line."""
    shown = [
        (site, layer)
        for site, counts in run.layout.items()
        for layer, count in enumerate(counts)
        if count and (site, layer) in layers
    ]
    several = len({site for site, _ in shown}) > 1
    titles = [f"{site} · layer {layer}" if several else f"layer {layer}" for site, layer in shown]
    starts = {number for number in range(1, len(shown)) if shown[number][0] != shown[number - 1][0]}
    return dict(zip(shown, sheet.panels(titles, [size] * len(shown), starts=starts, **options), strict=True))
