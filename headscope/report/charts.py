"""What figures draw into panels: cells, lines, bars, their axes and the ranges of their colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import rcParams
from matplotlib.colors import Colormap, Normalize
from matplotlib.container import BarContainer
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator
from numpy.typing import ArrayLike, NDArray

from headscope.config.declarations import Measure
from headscope.errors import ConfigError
from headscope.report.sheet import text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.collections import QuadMesh

Array = NDArray[np.float64]
FLAT = 1e-3  # a span below this share of the values is rounding, not a change
STEPS = (1, 2, 4, 5, 10, 20, 50, 100)


def draw_cells(
    axes: Axes, values: Array, *, cmap: Colormap | str, norm: Normalize, left: float = 0, edge: bool = True
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
        linewidth=rcParams["patch.linewidth"] if edge else 0,
    )
    axes.set(xlim=(left, left + columns), ylim=(rows, 0))
    hide_frame(axes)
    return mesh


def hide_frame(axes: Axes) -> None:
    """No lines and ticks around cells."""
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


class CellLocator(Locator):
    """The middles of every, every second, fourth … of a number of cells, as many as have room for theirs."""

    def __init__(self, count: int, left: float = 0) -> None:
        self.count, self.left, self.size = count, left, float(rcParams["xtick.labelsize"])

    def __call__(self) -> Any:
        """The places of ticks."""
        axis: Any = self.axis
        across = axis.axis_name == "x"
        low, high = axis.get_view_interval()
        box = axis.axes.get_window_extent()
        pitch = (box.width if across else box.height) / axis.axes.figure.dpi / max(abs(high - low), 1e-9)
        digits = "0" * len(str(max(self.count - 1, 0)))
        needed = text_width(digits, self.size) + 0.035 if across else 1.15 * self.size / 72
        step = next((step for step in STEPS if step * pitch >= needed), max(self.count, 1))
        return np.arange(0, self.count, step) + 0.5 + self.left


def number_cells(axes: Axes, *, x: int = 0, y: int = 0, left: float = 0, first: int = 0) -> None:
    """Numbers of `x` columns and `y` rows of cells, as many as have room, from `first` on."""
    for axis, count, start, number in ((axes.xaxis, x, left, first), (axes.yaxis, y, 0.0, 0)):
        if count:
            axis.set_major_locator(CellLocator(count, start))
            less = start + 0.5 - number
            axis.set_major_formatter(FuncFormatter(lambda place, _, less=less: f"{place - less:.0f}"))


def frame_chart(axes: Axes, xlabel: str, ylabel: str, *, whole: tuple[bool, bool] = (False, False)) -> None:
    """Labels with units, ticks and grid; `whole` says of each axis whether it counts something."""
    axes.set(xlabel=xlabel, ylabel=ylabel)
    for axis, integer in zip((axes.xaxis, axes.yaxis), whole, strict=True):
        axis.set_major_locator(MaxNLocator(4 if axis is axes.xaxis else 5, integer=integer))
        axis.set_major_formatter(FuncFormatter(short_number))
    axes.grid(visible=True)


def short_number(value: float, _: object = None) -> str:
    """12000 as 12k, 3500000 as 3.5M, −0.25 with a minus sign; never an offset or a power beside the axis."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and value % size == 0):
            return f"{value / size:g}{letter}".replace("-", "−")
    return f"{value:g}".replace("-", "−")


def share_limits(panels: Sequence[Axes], *, axis: str = "y", room: float = 0.05) -> None:
    """The same limits for all panels, around all that they draw; values that differ by rounding alone look level."""
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
    bars = axis == "y" and any(isinstance(drawn, BarContainer) for panel in panels for drawn in panel.containers)
    for panel in panels:
        (panel.set_ylim if axis == "y" else panel.set_xlim)(low - edge * (not bars), high + edge)


def draw_bars(
    axes: Axes,
    places: ArrayLike,
    parts: Mapping[str, tuple[str, ArrayLike]],
    *,
    width: float = 0.86,
    level: bool = False,
) -> None:
    """Stacked bars: parts by their meaning, each with its colour and a length a bar; `level`: from left to right."""
    start = np.zeros(np.size(places))
    for meaning, (color, lengths) in parts.items():
        label = meaning if np.any(lengths) else None
        if level:
            axes.barh(places, lengths, width, left=start, color=color, edgecolor="white", linewidth=0.4, label=label)
        else:
            axes.bar(places, lengths, width, bottom=start, color=color, linewidth=0, label=label)
        start = start + np.asarray(lengths, dtype=float)


def draw_course(
    axes: Axes, x: Any, y: Any, color: str, *, low: Any = None, high: Any = None, label: str = "", **look: Any
) -> None:
    """A line, with a band from `low` to `high` where these are given."""
    axes.plot(x, y, color=color, label=label or None, **look)
    if low is not None:
        axes.fill_between(x, low, high, color=color, alpha=0.17, linewidth=0)


def draw_intervals(axes: Axes, values: Any, places: Any, low: Any, high: Any) -> None:
    """Level bars of 95 % intervals."""
    ends = [(values - low).clip(lower=0), (high - values).clip(lower=0)]
    size = rcParams["lines.linewidth"] * 0.7
    axes.errorbar(values, places, xerr=ends, fmt="none", ecolor="#222222", elinewidth=size, capsize=1.5, capthick=size)


def shared_limits(arrays: Sequence[Array]) -> Normalize:
    """The range of all finite values together, widened where it is a single point."""
    joined = np.concatenate([array.ravel() for array in arrays]) if arrays else np.zeros(1)
    values = joined[np.isfinite(joined)]
    if not values.size:
        return Normalize(0, 1)
    low, high = float(values.min()), float(values.max())
    return Normalize(low, high) if high > low else Normalize(low - 0.5, high + 0.5)


def centred_limits(arrays: Sequence[Array]) -> Normalize:
    """A range that is as far below zero as above."""
    limits = shared_limits(arrays)
    furthest = max(abs(limits.vmin or 0.0), abs(limits.vmax or 0.0)) or 0.5
    return Normalize(-furthest, furthest)


def measure_limits(measure: Measure, arrays: Sequence[Array], ends: Sequence[float] = ()) -> Normalize:
    """`ends` where they are given (`--range LOW,HIGH`), else the range that a measure declares.

    Open ends of that are the smallest and the largest of all values, of a signed measure as far below zero as above.
    Where all values lie beyond the end that it declares, their own range. ConfigError for ends that are none.
    """
    if len(ends):
        return parse_range(ends)
    if measure.signed and None in measure.range:
        return centred_limits(arrays)
    low, high = measure.range
    limits = shared_limits(arrays)
    declared = Normalize(limits.vmin if low is None else low, limits.vmax if high is None else high)
    return declared if (declared.vmin or 0) < (declared.vmax or 0) else limits


def parse_range(ends: Sequence[float]) -> Normalize:
    """Two numbers, the lower first; else ConfigError."""
    if len(ends) != 2 or not (np.isfinite(ends).all() and ends[0] < ends[1]):
        text = ",".join(f"{end:g}" for end in ends)
        raise ConfigError(f"--range {text}: give two numbers, the lower first, such as --range 0,1")
    return Normalize(ends[0], ends[1])
