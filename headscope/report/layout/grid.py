"""One site's heads as a layers × heads grid: values, head numbers, functions, and its drawing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.config.declarations import Measure
from headscope.errors import ConfigError
from headscope.report.layout.legend import Function, contrast, fit, functions_of
from headscope.report.layout.output import cell_pitch
from headscope.report.layout.page import BAR, LABEL, PALE, RULE, TICK, text_width
from headscope.results.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

LEFT, ABOVE, BELOW = 0.42, 0.2, 0.34  # inches around a grid: layer numbers, its title, head numbers
MISSING = "////"  # hatch of places where a layer has no such head
LINE = 0.115  # inches a line of marks takes


@dataclass(frozen=True)
class Grid:
    """Row per layer, slot per head; `heads` is −1 in slots that a layer does not have."""

    site: str
    values: NDArray[np.float64]  # [layer slot], NaN where the measure has no value
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


def grids_of(run: Study, measure: str | None = None, *, sort: bool = False, unsupported: bool = False) -> list[Grid]:
    """One grid a site; with `sort` the heads of a layer go from the highest value to the lowest.

    With `unsupported` heads also have the functions that lack evidence, hollow.
    """
    grids = [_grid(run, site, counts, measure, unsupported=unsupported) for site, counts in run.layout.items()]
    return [_sorted(grid) for grid in grids] if sort else grids


def cell_size(columns: int, *, lines: int = 1, besides: float = LEFT + BAR) -> tuple[float, float]:
    """Width and height of a cell in inches: larger where few heads leave room or many lines need it.

    `besides` is what stands left and right of the cells, where a width is asked for.
    """
    wide, tall = (0.46, 0.34) if columns <= 8 else (0.4, 0.3) if columns <= 12 else (0.37, 0.27)
    narrow = cell_pitch(wide, columns, besides=besides + 0.1)
    return narrow, max(tall if narrow == wide else max(min(tall, narrow), LINE + 0.02), lines * LINE + 0.02)


def shared_limits(arrays: Sequence[NDArray[np.float64]]) -> Normalize:
    """The range of all finite values together, widened where it is a single point."""
    joined = np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(1)
    values = joined[np.isfinite(joined)]
    if not values.size:
        return Normalize(0, 1)
    low, high = float(values.min()), float(values.max())
    return Normalize(low, high) if high > low else Normalize(low - 0.5, high + 0.5)


def centred_limits(arrays: Sequence[NDArray[np.float64]]) -> Normalize:
    """A range that is as far below zero as above."""
    limits = shared_limits(arrays)
    furthest = max(abs(limits.vmin or 0.0), abs(limits.vmax or 0.0)) or 0.5
    return Normalize(-furthest, furthest)


def measure_limits(measure: Measure, arrays: Sequence[NDArray[np.float64]]) -> Normalize:
    """The range that a measure declares, its open ends at the smallest and the largest of all values.

    Of a signed measure as far below zero as above. Where all values lie beyond the end that it declares, their own
    range.
    """
    if measure.signed and None in measure.range:
        return centred_limits(arrays)
    low, high = measure.range
    limits = shared_limits(arrays)
    declared = Normalize(limits.vmin if low is None else low, limits.vmax if high is None else high)
    return declared if (declared.vmin or 0) < (declared.vmax or 0) else limits


def parse_range(ends: Sequence[float]) -> Normalize | None:
    """`--range LOW,HIGH`; ConfigError where these are no two numbers, the lower first."""
    if not ends:
        return None
    if len(ends) != 2 or not (np.isfinite(ends).all() and ends[0] < ends[1]):
        text = ",".join(f"{end:g}" for end in ends)
        raise ConfigError(f"--range {text}: give two numbers, the lower first, such as --range 0,1")
    return Normalize(ends[0], ends[1])


def draw_cells(
    axes: Axes,
    values: NDArray[np.float64],
    *,
    cmap: Colormap | str,
    norm: Normalize,
    edge: float = 0.6,
    left: float = 0,
) -> QuadMesh:
    """Coloured cells with white edges, first row at the top; cells without a value stay empty."""
    rows, columns = values.shape
    mesh = axes.pcolormesh(
        np.arange(columns + 1) + left,
        np.arange(rows + 1),
        np.ma.masked_invalid(values),
        cmap=cmap,
        norm=norm,
        edgecolors="white" if edge else "none",
        linewidth=edge,
    )
    axes.set(xlim=(left, left + columns), ylim=(rows, 0))
    return mesh


def draw_blanks(axes: Axes, grid: Grid) -> None:
    """Hatch behind slots without a head; plain grey where a head has no value."""
    if grid.ragged:
        axes.patch.set(hatch=MISSING, edgecolor=RULE, facecolor="white", linewidth=0)
    for layer, slot in zip(*np.nonzero((grid.heads >= 0) & np.isnan(grid.values)), strict=True):
        axes.add_patch(Rectangle((slot, layer), 1, 1, facecolor=PALE, edgecolor="white", linewidth=0.6, hatch=""))


def label_grid(axes: Axes, grid: Grid, *, title: str, cell: float, xlabel: str = "head", first: int = 0) -> None:
    """Layer and head numbers in the middle of cells that are `cell` inches wide, as many as have room.

    Ranks of a sorted grid count from `first`.
    """
    layers, slots = grid.heads.shape
    shown = range(0, slots, tick_step(slots, cell))
    axes.set_xticks([slot + 0.5 for slot in shown], [str(slot + first) for slot in shown])
    axes.set_yticks(np.arange(layers) + 0.5, [str(layer) for layer in range(layers)])
    axes.set_xlabel(xlabel, size=LABEL, labelpad=2)
    axes.set_ylabel("layer", size=LABEL, labelpad=3)
    axes.set_title(title, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)


def tick_step(count: int, pitch: float) -> int:
    """Every how many-th of `count` numbers has room, set side by side every `pitch` inches: 1, 2, 4, 5, 10 …."""
    needed = text_width("0" * len(str(max(count - 1, 0))), TICK) + 0.035
    return next((step for step in (1, 2, 4, 5, 10, 20, 50, 100) if step * pitch >= needed), max(count, 1))


def square_ticks(axes: Axes, heads: int, pitch: float) -> None:
    """Head numbers at both sides of a matrix of heads, in the middle of cells, as many as have room."""
    ticks = np.arange(0, heads, tick_step(heads, pitch))
    axes.set_xticks(ticks + 0.5, [str(tick) for tick in ticks])
    axes.set_yticks(ticks + 0.5, [str(tick) for tick in ticks])


def draw_marks(
    axes: Axes, grid: Grid, shades: ScalarMappable, *, cell: tuple[float, float], numbers: bool = False
) -> None:
    """Functions (and head numbers where they fit) in black or white, whichever the cell's colour allows."""
    for layer, row in enumerate(grid.functions):
        for slot, functions in enumerate(row):
            value = grid.values[layer, slot]
            ink = contrast(shades.to_rgba(value)) if np.isfinite(value) else "black"
            room = int(cell[1] / LINE)
            lines = cell_lines(functions, cell[0] - 0.03, most=room)
            number = f"h{grid.heads[layer, slot]}"
            if numbers and grid.heads[layer, slot] >= 0 and len(lines) < room and text_width(number, TICK) < cell[0]:
                lines = [number, *lines]
            if lines:
                _write(axes, slot + 0.5, layer + 0.5, lines, ink)


def cell_lines(functions: Sequence[Function], width: float, *, most: int) -> list[str]:
    """A line per function; where there are more than `most`, the last line counts the rest."""
    if len(functions) > most:
        shown = max(most - 1, 0)
        return [*(fit(f, width, TICK) for f in functions[:shown]), f"+{len(functions) - shown}"]
    return [fit(function, width, TICK) for function in functions]


def _write(axes: Axes, x: float, y: float, lines: Sequence[str], ink: str) -> None:
    axes.text(x, y, "\n".join(lines), size=TICK, color=ink, ha="center", va="center", linespacing=1.1)


def _grid(run: Study, site: str, counts: Sequence[int], measure: str | None, *, unsupported: bool) -> Grid:
    slots = max(counts, default=0)
    values = np.full((len(counts), slots), np.nan)
    heads = np.full((len(counts), slots), -1, dtype=np.int64)
    functions: list[list[tuple[Function, ...]]] = [[()] * slots for _ in counts]
    for layer, count in enumerate(counts):
        heads[layer, :count] = np.arange(count)
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
