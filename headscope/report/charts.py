"""Drawing into panels: cells, lines, bars and maps of heads, their axes, and colour ranges."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Colormap, Normalize
from matplotlib.container import BarContainer
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from headscope.config.declarations import Measure
from headscope.errors import ConfigError, flag
from headscope.report.marks import Function, contrast, fit, function_entries, functions_of
from headscope.report.sheet import PALE, RULE, Sheet, swatch, text_width
from headscope.results.study import Study

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.collections import QuadMesh

Array = NDArray[np.float64]
FLAT = 1e-3  # a span below this share of the values is rounding, not a change
STEPS = (1, 2, 4, 5, 10, 20, 50, 100)
MISSING = "////"  # hatch of places where a layer has no such head
CELL = (4.0, 3.0)  # ems of a head
LEADING = 1.25
SHARES = Normalize(0, 1)


def draw_cells(
    axes: Axes,
    values: Array,
    *,
    cmap: Colormap | str = "Blues",
    norm: Normalize = SHARES,
    left: float = 0,
    edge: bool = True,
) -> QuadMesh:
    """Draw a matrix as coloured cells, the first row at the top; NaN stays empty. `edge`: white lines between cells."""
    rows, columns = values.shape
    edges = np.arange(columns + 1) + left, np.arange(rows + 1)
    looks: dict[str, Any] = {"edgecolors": "white", "linewidth": rcParams["patch.linewidth"]} if edge else {}
    mesh = axes.pcolormesh(*edges, np.ma.masked_invalid(values), cmap=cmap, norm=norm, **looks)
    axes.set(xlim=(left, left + columns), ylim=(rows, 0))
    hide_frame(axes)
    return mesh


def hide_frame(axes: Axes) -> None:
    """Hide the frame and the ticks of a panel."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def number_cells(axes: Axes, *, x: int = 0, y: int = 0, left: float = 0, first: int = 0) -> None:
    """Number `x` columns (the first one, at `left`, has the number `first`) and `y` rows of cells.

    Where the numbers of all cells would overlap, only every second, fourth, … has its number.
    """
    size, sheet = float(rcParams["xtick.labelsize"]), axes.figure
    digits_width = text_width("0" * len(str(max(x - 1, 0))), size) + 0.035

    def set_numbers(cell_width: float, cell_height: float) -> None:
        for axis, count, room, start, shift in (
            (axes.xaxis, x, cell_width / digits_width, first, 0.5 + left),
            (axes.yaxis, y, 72 * cell_height / (1.15 * size), 0, 0.5),
        ):
            if count:
                numbers = range(0, count, next((step for step in STEPS if step * room >= 1), count))
                axis.set_ticks([number + shift for number in numbers], [str(number + start) for number in numbers])

    set_numbers(np.inf, np.inf)
    sheet.after_layout.append(lambda: set_numbers(*cell_inches(axes)))  # type: ignore[union-attr]


def frame_chart(axes: Axes, xlabel: str, ylabel: str, *, integers: tuple[bool, bool] = (False, False)) -> None:
    """Set labels, ticks and grid; `integers` says for the x and the y axis whether its ticks are whole numbers."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for axis, integer in zip((axes.xaxis, axes.yaxis), integers, strict=True):
        axis.set_major_locator(MaxNLocator(4 if axis is axes.xaxis else 5, integer=integer))
        axis.set_major_formatter(FuncFormatter(short_number))
    axes.grid(visible=True)


def short_number(value: float, _: object = None) -> str:
    """A tick label: 12000 as 12k, 3500000 as 3.5M, -0.25 with a minus sign; without offset or power of ten."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:g}{letter}".replace("-", "−")
    return f"{value:g}".replace("-", "−")


@dataclass(frozen=True)
class Chart:
    """A panel of lines or bars, which `draw` fills; charts of one `group` (default: `ylabel`) share their limits."""

    title: str
    draw: Callable[[Axes], None]
    xlabel: str
    ylabel: str
    integers: tuple[bool, bool] = (True, False)  # whether the x and the y axis have whole numbers
    group: str = ""


def draw_charts(sheet: Sheet, charts: Sequence[Chart], size: tuple[float, float]) -> list[Axes]:
    """Draw all charts into panels of a `size` in ems; limits that a chart sets itself stay."""
    panels = sheet.panels([chart.title for chart in charts], [size] * len(charts), share="")
    groups: dict[str, list[Axes]] = {}
    for chart, axes in zip(charts, panels, strict=True):
        frame_chart(axes, chart.xlabel, chart.ylabel, integers=chart.integers)
        chart.draw(axes)
        groups.setdefault(chart.group or chart.ylabel, []).append(axes)
    for group in groups.values():
        if group[0].get_autoscaley_on():
            share_limits(group)
    return panels


def share_limits(panels: Sequence[Axes], *, axis: str = "y", room: float = 0.05) -> None:
    """Give all panels the same limits, around everything they draw; rounding errors do not fill the axis."""
    bounds = [panel.dataLim.intervaly if axis == "y" else panel.dataLim.intervalx for panel in panels]
    finite = np.array([bound for bound in bounds if np.isfinite(bound).all() and bound[0] <= bound[1]])
    if not len(finite):
        return
    low, high = float(finite[:, 0].min()), float(finite[:, 1].max())
    largest = max(abs(low), abs(high))
    if high - low <= FLAT * largest:
        middle, reach = (low + high) / 2, 0.05 * largest or 0.5
        low, high = middle - reach, middle + reach
    edge = room * (high - low)
    bars = axis == "y" and any(
        isinstance(container, BarContainer) for panel in panels for container in panel.containers
    )
    for panel in panels:
        (panel.set_ylim if axis == "y" else panel.set_xlim)(low - edge * (not bars), high + edge)


def draw_bars(
    axes: Axes,
    positions: ArrayLike,
    parts: Mapping[str, tuple[str, ArrayLike]],
    *,
    width: float = 0.86,
    horizontal: bool = False,
) -> None:
    """Draw stacked bars: parts by their meaning, each with a colour and its length in every bar."""
    start = np.zeros(np.size(positions))
    for meaning, (color, lengths) in parts.items():
        label = meaning if np.any(lengths) else None
        if horizontal:
            axes.barh(positions, lengths, width, left=start, color=color, edgecolor="white", linewidth=0.4, label=label)
        else:
            axes.bar(positions, lengths, width, bottom=start, color=color, linewidth=0, label=label)
        start = start + np.asarray(lengths, dtype=float)


def draw_curve(
    axes: Axes, x: Any, y: Any, color: str, *, low: Any = None, high: Any = None, label: str = "", **look: Any
) -> None:
    """Draw a line, with a band from `low` to `high` if these are given."""
    axes.plot(x, y, color=color, label=label or None, **look)
    if low is not None:
        axes.fill_between(x, low, high, color=color, alpha=0.17, linewidth=0)


def draw_intervals(axes: Axes, values: Any, rows: Any, low: Any, high: Any) -> None:
    """Draw 95 % intervals as horizontal error bars."""
    ends = [(values - low).clip(lower=0), (high - values).clip(lower=0)]
    size = rcParams["lines.linewidth"] * 0.7
    axes.errorbar(values, rows, xerr=ends, fmt="none", ecolor="#222222", elinewidth=size, capsize=1.5, capthick=size)


def value_limits(arrays: Sequence[Array], *, symmetric: bool = False) -> Normalize:
    """The range of all finite values, widened if it is a single point; `symmetric`: centred at zero."""
    values = np.concatenate([np.zeros(0), *(array[np.isfinite(array)] for array in arrays)])
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    if symmetric:
        high = max(abs(low), abs(high)) or 0.5
        low = -high
    return Normalize(low, high) if high > low else Normalize(low - 0.5, high + 0.5)


def measure_limits(measure: Measure, arrays: Sequence[Array], ends: Sequence[float] = ()) -> Normalize:
    """The range of a colour scale: `ends` (`--range LOW,HIGH`) if given, else the one that the measure declares."""
    if len(ends):
        return parse_range(ends)
    low, high = measure.range
    limits = value_limits(arrays, symmetric=measure.signed and None in measure.range)
    norm = Normalize(limits.vmin if low is None else low, limits.vmax if high is None else high)
    return norm if (norm.vmin or 0) < (norm.vmax or 0) else limits


def parse_range(ends: Sequence[float]) -> Normalize:
    """Two numbers, the lower first; else ConfigError."""
    if len(ends) != 2 or not (np.isfinite(ends).all() and ends[0] < ends[1]):
        text = ",".join(f"{end:g}" for end in ends)
        raise ConfigError(f"{flag.range} {text}: give two numbers, the lower first, such as {flag.range} 0,1")
    return Normalize(ends[0], ends[1])


@dataclass(frozen=True)
class Grid:
    """The heads of a site: a row a layer, a slot a head. Layers with fewer heads have −1 in `heads` in empty slots."""

    site: str
    values: Array  # [layer slot], NaN where the measure has no value
    heads: NDArray[np.int64]  # [layer slot]
    functions: list[list[tuple[Function, ...]]]

    @property
    def max_functions(self) -> int:
        """The largest number of functions that one head has."""
        return max((len(cell) for row in self.functions for cell in row), default=0)

    def size(self, lines: int = 1) -> tuple[float, float]:
        """The grid's size in ems with this number of lines of marks a head; large grids have narrower cells."""
        layers, slots = self.heads.shape
        wide = CELL[0] * (1.1 if slots <= 8 else 1.0 if slots <= 12 else 0.85)
        return max(slots, 1) * wide, layers * max(CELL[1], LEADING * lines + 0.4)


def grids_of(run: Study, measure: str | None = None, *, sort: bool = False) -> list[Grid]:
    """A grid for every site; `sort` orders the heads of each layer from the highest value to the lowest."""
    grids = []
    for site, counts in run.layout.items():
        slots = max(counts, default=0)
        values = np.full((len(counts), slots), np.nan)
        heads = np.where(np.arange(slots) < np.array(counts)[:, None], np.arange(slots), -1)
        functions: list[list[tuple[Function, ...]]] = [[()] * slots for _ in counts]
        for row in run.heads[run.heads["site"] == site].to_dict("records"):
            layer, head = row["layer"], row["head"]
            values[layer, head] = row[measure] if measure else np.nan
            functions[layer][head] = functions_of(row["functions"])
        grid = Grid(site, values, heads, functions)
        grids.append(_sort_heads(grid) if sort else grid)
    return grids


def _sort_heads(grid: Grid) -> Grid:
    """A grid with each layer sorted from its highest value to its lowest, then heads without a value, then no heads."""
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
    norm: Normalize = SHARES,
    lines: int = 1,
    marks: bool = True,
    ranks: bool = False,
) -> ScalarMappable:
    """Draw a grid: slots without a head hatched, heads without a value grey, functions as `marks`.

    Cells have the same size in all panels of a sheet with the same number of `lines`. `ranks`: heads are sorted.
    """
    shades = draw_cells(axes, grid.values, cmap=cmap, norm=norm)
    for layer, slot in zip(*np.nonzero(np.isnan(grid.values)), strict=True):
        looks: dict[str, Any] = {"facecolor": PALE, "edgecolor": "white", "linewidth": 0.6}
        if grid.heads[layer, slot] < 0:
            looks = {"facecolor": "white", "edgecolor": RULE, "hatch": MISSING, "linewidth": 0}
        axes.add_patch(Rectangle((slot, layer), 1, 1, **looks))
    layers, slots = grid.heads.shape
    (wide, tall), (room, height) = grid.size(lines), sheet.sizes[axes]
    axes.set(xlim=(0, max(slots, 1) * room / wide), ylim=(layers * height / tall, 0))
    axes.set(xlabel="rank, highest first" if ranks else "head", ylabel="layer")
    number_cells(axes, x=slots, y=layers, first=int(ranks))
    if marks:
        sheet.after_layout.append(lambda: _write_marks(axes, grid, shades, numbers=ranks))
    return shades


def grid_entries(grids: Sequence[Grid], *more: Artist, with_colors: bool = False) -> list[Artist | str]:
    """Entries of the legend: the functions of heads, then `more`, then hatched slots if there are any."""
    functions = [function for grid in grids for row in grid.functions for cell in row for function in cell]
    is_ragged = any((grid.heads < 0).any() for grid in grids)
    blank = [swatch("white", "no such head in this layer", hatch="///")] if is_ragged else []
    return [*function_entries(functions, with_colors=with_colors), *more, *blank]


def _write_marks(axes: Axes, grid: Grid, shades: ScalarMappable, *, numbers: bool) -> None:
    """Write functions, and head numbers where they fit, in black or white, whichever is readable on the cell."""
    size = rcParams["xtick.labelsize"]
    wide, tall = cell_inches(axes)
    room = int(tall / (LEADING * size / 72))
    looks: dict[str, Any] = {"size": size, "ha": "center", "va": "center", "linespacing": 1.1}
    for layer, row in enumerate(grid.functions):
        for slot, functions in enumerate(row):
            value = grid.values[layer, slot]
            ink = contrast(shades.to_rgba(value)) if np.isfinite(value) else "black"
            lines = cell_lines(functions, wide * 0.95, room=room)
            number = f"h{grid.heads[layer, slot]}"
            if numbers and grid.heads[layer, slot] >= 0 and len(lines) < room and text_width(number, size) < wide:
                lines = [number, *lines]
            if lines:
                axes.text(slot + 0.5, layer + 0.5, "\n".join(lines), color=ink, **looks)


def cell_inches(axes: Axes) -> tuple[float, float]:
    """Width and height of a cell, once the layout is done."""
    box, dpi = axes.get_window_extent(), axes.figure.dpi
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    return box.width / dpi / abs(right - left), box.height / dpi / abs(top - bottom)


def cell_lines(functions: Sequence[Function], width: float, *, room: int) -> list[str]:
    """A line for every function; if there are more than `room`, the last line ends in an ellipsis."""
    size = float(rcParams["xtick.labelsize"])
    lines = [fit(function, width, size) for function in functions[: max(room, 1)]]
    if len(lines) < len(functions):
        lines[-1] = fit(functions[len(lines) - 1], width - text_width("…", size), size) + "…"
    return lines


def layer_panels(
    sheet: Sheet, run: Study, size: tuple[float, float], layers: Collection[tuple[str, int]], **options: Any
) -> dict[tuple[str, int], Axes]:
    """A panel of a `size` in ems for each of these layers that has heads; each site begins a line."""
    heads = [(site, layer, count) for site, counts in run.layout.items() for layer, count in enumerate(counts)]
    site_layers = [(site, layer) for site, layer, count in heads if count and (site, layer) in layers]
    has_sites = len({site for site, _ in site_layers}) > 1
    titles = [f"{site} · layer {layer}" if has_sites else f"layer {layer}" for site, layer in site_layers]
    starts = {number for number in range(1, len(site_layers)) if site_layers[number][0] != site_layers[number - 1][0]}
    return dict(
        zip(site_layers, sheet.panels(titles, [size] * len(site_layers), starts=starts, **options), strict=True)
    )
