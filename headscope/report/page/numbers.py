"""Numbers as the page has them: rounded, JSON without NaN, in words, and as colours of a measure's scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from numpy.typing import ArrayLike, NDArray

from headscope.config.declarations import Measure
from headscope.engine import rank_correlation

DIGITS = 9
"""Significant digits of a number in the page's data, the run's files have all.

So many that three of them are those of the number itself: of 0.180502 five are 0.1805, and three of these 0.18.
"""
DIVERGING = "RdBu_r"
DIVERGING_MAPS = {
    *("RdBu_r", "RdBu", "coolwarm", "bwr", "seismic", "PuOr", "PuOr_r", "PiYG", "BrBG", "RdYlBu_r", "berlin"),
}
STOPS = 17
LOSS = "loss (nats)"


def rounded(value: Any) -> float | int | None:
    """A number as the page's data have it; None for NaN and infinities. Whole numbers stay whole."""
    number = float(value)
    if not math.isfinite(number):
        return None
    if number == int(number) and abs(number) < 1e15:
        return int(number)
    return float(f"{number:.{DIGITS}g}")


def rounded_all(values: Iterable[Any]) -> list[float | int | None]:
    """The same for several."""
    return [rounded(value) for value in values]


def words(value: Any) -> str:
    """A number for a sentence: three significant digits, a true minus sign."""
    number = float(value)
    if not math.isfinite(number):
        return "no number"
    text = f"{number:,.0f}" if abs(number) >= 999.5 else f"{number:.3g}"
    return text.replace("e-0", "e-").replace("-", "−")


def with_interval(value: Any, low: Any, high: Any) -> str:
    """`0.12 (95 %: 0.1 to 0.14)`; the number alone where the interval is none or of no width."""
    if not all(math.isfinite(float(end)) for end in (low, high)) or float(low) == float(high):
        return words(value)
    return f"{words(value)} (95 %: {words(low)} to {words(high)})"


def spearman(x: ArrayLike, y: ArrayLike) -> tuple[float, int]:
    """Spearman's rank correlation of the pairs without NaN, and their number; NaN where it is not defined."""
    first, second = np.asarray(x, dtype=float), np.asarray(y, dtype=float)
    both = np.isfinite(first) & np.isfinite(second)
    count = int(both.sum())
    if count < 3:
        return math.nan, count
    return rank_correlation.spearman(first[both], second[both]), count


def scale(measure: Measure, values: NDArray[np.float64]) -> dict[str, Any]:
    """`low`, `high`, the name of the colour map, and whether zero is in the middle.

    Ends that the measure does not declare are those of the values.
    """
    known = values[np.isfinite(values)]
    ends = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    low, high = (end if declared is None else declared for declared, end in zip(measure.range, ends, strict=True))
    if low >= high:
        low, high = ends if ends[0] < ends[1] else (ends[0] - 0.5, ends[0] + 0.5)
    diverging = measure.cmap in DIVERGING_MAPS or (low < 0 < high and ends[0] < 0)
    if diverging:
        low, high = -max(abs(low), abs(high)), max(abs(low), abs(high))
    cmap = DIVERGING if diverging and measure.cmap not in DIVERGING_MAPS else measure.cmap
    return {"low": low, "high": high, "cmap": cmap, "diverging": diverging}


def palette(name: str) -> list[str]:
    """Colours of a map, evenly from its lower end to its upper one."""
    return [to_hex(color) for color in colormaps[name](np.linspace(0, 1, STOPS))]


def palettes(names: Iterable[str]) -> dict[str, list[str]]:
    """Those of several maps by name."""
    return {name: palette(name) for name in sorted({*names, DIVERGING, "viridis"})}
