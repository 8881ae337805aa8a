"""The colour scale of every measure: the range that its analysis declares, zero in the middle where it has a sign."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import to_hex
from numpy.typing import NDArray

from headscope.engine.declarations import Measure

DIVERGING = "RdBu_r"
DIVERGING_MAPS = {
    "RdBu_r",
    "RdBu",
    "coolwarm",
    "bwr",
    "seismic",
    "PuOr",
    "PuOr_r",
    "PiYG",
    "BrBG",
    "RdYlBu_r",
    "berlin",
}
STOPS = 17


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
