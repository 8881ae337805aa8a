"""Panels of curves: axes without boxes, a faint grid, numbers without offsets, limits that panels share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import FuncFormatter, MaxNLocator

from headscope.report.layout.page import LABEL, RULE, TICK, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BESIDE = 0.15  # inches that a title may reach beyond its panel
FLAT = 1e-3  # a span below this share of the values is rounding, not a change


def chart(
    axes: Axes, *, title: str, xlabel: str, ylabel: str, width: float, whole: tuple[bool, bool] = (False, False)
) -> None:
    """Title, labels with units, ticks and grid; `whole` says of each axis whether it counts something."""
    text = shorten(title, width + BESIDE, LABEL, weight="bold")
    axes.set_title(text, size=LABEL, loc="left", pad=4, weight="bold", parse_math=False)
    axes.set_xlabel(xlabel, size=TICK, labelpad=2)
    axes.set_ylabel(ylabel, size=TICK, labelpad=3)
    for axis, integer, most in zip((axes.xaxis, axes.yaxis), whole, (4 if width < 2.2 else 5, 5), strict=True):
        axis.set_major_locator(MaxNLocator(most, integer=integer))
        axis.set_major_formatter(FuncFormatter(short_number))
    axes.tick_params(length=1.5, width=0.4, color=RULE)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(linewidth=0.3, color="#e4e4e4")
    axes.set_axisbelow(True)


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
    span = max(high - low, FLAT * max(abs(low), abs(high)))
    if high - low < span or not span:
        middle, reach = (low + high) / 2, 0.5 * (0.1 * max(abs(low), abs(high)) or 1.0)
        low, high = middle - reach, middle + reach
        span = high - low
    if axis == "y" and any(panel.patches for panel in panels):  # bars stand on the axis
        low += room * span
    for panel in panels:
        setter = panel.set_ylim if axis == "y" else panel.set_xlim
        setter(low - room * span, high + room * span)
