"""Small multiples: where panels of modules stand, how charts look, and limits that they share."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.container import BarContainer
from matplotlib.ticker import FuncFormatter, MaxNLocator

from headscope.report.layout.output import panel_width
from headscope.report.layout.page import LABEL, RULE, TICK, Flow, Page, even_width, flow, shorten, text_width
from headscope.results.study import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BESIDE = 0.15  # inches that a title may reach beyond its panel
FLAT = 1e-3  # a span below this share of the values is rounding, not a change
PanelLayer = tuple[str, int, int]
"""site, layer, number of heads"""
GAP = (0.2, 0.12)  # inches between panels, and between their lines
TITLE_LEFT = 0.5  # inches left of a panel's title: the labels of its rows


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
    bars = any(isinstance(drawn, BarContainer) for panel in panels for drawn in panel.containers)
    if axis == "y" and bars:  # they stand on the axis
        low += room * span
    for panel in panels:
        setter = panel.set_ylim if axis == "y" else panel.set_xlim
        setter(low - room * span, high + room * span)


def shared_pitch(
    usual: float,
    cells: float,
    run: Study,
    *,
    left: float,
    most: float,
    besides: float = 0.0,
    only: Container[tuple[str, int]] | None = None,
) -> float:
    """Inches of each of the cells in a row of a panel: as usual, or so that a site's panels fill the asked width.

    See `panel_width`; for as many panels in a line as leave a cell 0.7 of the usual, and 0.05 at least.
    """
    count = _longest(_shown(run, only))
    wide = panel_width(usual * cells, count, left=left, gap=GAP[0], most=most, besides=besides, least=0.7)
    return max(wide / cells, 0.05)


def _shown(run: Study, only: Container[tuple[str, int]] | None) -> list[PanelLayer]:
    return [
        (site, layer, count)
        for site, counts in run.layout.items()
        for layer, count in enumerate(counts)
        if count and (only is None or (site, layer) in only)
    ]


def _longest(layers: Sequence[PanelLayer]) -> int:
    """The most layers of a site."""
    sites = [site for site, _, _ in layers]
    return max((sites.count(site) for site in sites), default=1)


@dataclass(frozen=True)
class Panels:
    """The layers that have heads, and where their panels stand: each site starts a line of its own."""

    layers: list[PanelLayer]
    flow: Flow
    sites: int

    @classmethod
    def plan(
        cls,
        run: Study,
        size: tuple[float, float],
        *,
        widest: float,
        only: Container[tuple[str, int]] | None = None,
    ) -> Panels:
        """Panels of `size` (labels included) in lines of at most `widest` inches; of `only` these layers, if given."""
        layers = _shown(run, only)
        sites = [site for site, _, _ in layers]
        longest = _longest(layers)
        titles = [_title(layer, sites=len(set(sites))) for layer in layers]
        needed = max((text_width(title, LABEL, weight="bold") for title in titles), default=0) + TITLE_LEFT
        size = (max(size[0], min(needed, widest)), size[1])
        width = even_width(longest, size[0], widest)
        breaks = frozenset(n for n in range(1, len(sites)) if sites[n] != sites[n - 1])
        return cls(layers, flow([size] * len(layers), width, gap=GAP, breaks=breaks), len(set(sites)))

    def __iter__(self) -> Iterator[tuple[PanelLayer, tuple[float, float]]]:
        """Every layer, with the corner of its panel in inches from the left and the top."""
        return zip(self.layers, self.flow.corners, strict=True)

    def axes(self, page: Page, layer: PanelLayer, *box: float) -> Axes:
        """Axes in a box of a page, `layer 3` above them, with the site where the figure shows several."""
        axes = page.axes(*box)
        title = _title(layer, sites=self.sites)
        axes.set_title(title, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
        return axes


def _title(layer: PanelLayer, *, sites: int) -> str:
    return f"{layer[0]} · layer {layer[1]}" if sites > 1 else f"layer {layer[1]}"
