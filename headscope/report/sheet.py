"""A sheet: a matplotlib figure with a headline, panels in lines, a legend, and colour scales.

Sizes are in ems, the height of letters, so that they suit every style. matplotlib's constrained layout places panels
and labels; a sheet is as high as its panels, headline and key need.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.textpath import text_to_path
from matplotlib.transforms import Bbox
from numpy.typing import NDArray

from headscope.errors import ConfigError, flag
from headscope.report.styles import FigureStyle

INK, GREY, PALE, RULE = "#222222", "#777777", "#eaeaea", "#bbbbbb"
LINE = 150.0  # ems of a line of panels, where no width is asked for
NARROWEST = 48.0
BESIDE, ABOVE, EDGE = 4.5, 5.0, 1.5
"""Ems that labels take beside a panel, those that they take above and below it, and those around everything."""
GAP = 0.6  # ems below a text
BAR = 8.0  # ems that a scale of colours takes
TALLEST = 200.0  # inches of a page of PDF


class Sheet(Figure):
    """A figure in a style, which `draw(run, sheet, options)` fills and `finish` sets."""

    def __init__(self, style: FigureStyle, signature: str = "") -> None:
        super().__init__()
        FigureCanvasAgg(self)
        self.style, self.signature = style, signature
        self.after_layout: list[Callable[[], None]] = []  # called once panels have their positions
        self.sizes: dict[Axes, tuple[float, float]] = {}  # ems of a panel's grid cell
        self.title = self.subtitle = ""
        self._entries: list[Artist] = []
        self._notes: list[str] = []
        self._body: float | None = None
        self._panels: dict[tuple[int, int], Axes] = {}
        self._share = ""
        if style.width:
            self.set_figwidth(style.width)

    def _repr_png_(self) -> bytes:
        """The image that notebooks show; IPython only knows how to show figures of pyplot."""
        image = BytesIO()
        self.savefig(image, format="png")
        return image.getvalue()

    def headline(self, title: str, subtitle: str) -> None:
        """Set the headline (the subject of the figure) and the line below it (model and data)."""
        self.title, self.subtitle = title, subtitle

    def panels(
        self,
        titles: Sequence[str],
        sizes: Sequence[tuple[float, float]],
        *,
        starts: Collection[int] = (),
        bar: bool = False,
        beside: float = BESIDE,
        above: float = ABOVE,
        share: str = "xy",
        group: int = 1,
    ) -> list[Axes]:
        """Add panels with titles, in lines as words of a text; panels whose numbers are in `starts` begin a line.

        `sizes` are in ems without labels; `beside` and `above` are the ems of labels. `bar` leaves room for a colour
        bar at the right. For the axes in `share` only outer panels have labels and ticks. Each `group` of consecutive
        panels stays in one line.
        """
        room = (self.style.width / em() if self.style.width else LINE) - BAR * bar - EDGE
        widths_sum = sum(max(width for width, _ in sizes[column::group]) for column in range(group))
        if self.style.width:  # panels may become somewhat narrower to fit it
            size = float(rcParams["axes.titlesize"])
            widest = max(text_width(title, size, weight="bold") for title in titles) / em()
            widths_sum = max(0.75 * widths_sum, min(widest - beside, 20.0))
        columns = max(1, int(room // (widths_sum + group * beside)))
        ends = [*sorted({*starts} - {0}), len(titles)]
        longest = int(max(np.diff([0, *ends]))) // group
        lines = math.ceil(longest / columns)
        columns = group * math.ceil(longest / lines)  # so that lines have about the same length
        cells: list[tuple[int, int]] = []
        for number in range(len(titles)):
            line, column = cells[-1] if cells else (-1, columns)
            cells.append((line + 1, 0) if number in starts or column + 1 >= columns else (line, column + 1))
        widths, heights = np.zeros(columns), np.zeros(cells[-1][0] + 1)
        for (line, column), (width, height) in zip(cells, sizes, strict=True):
            widths[column], heights[line] = max(widths[column], width), max(heights[line], height)
        if not self.style.width:
            self.set_figwidth(em() * max(widths.sum() + columns * beside + BAR * bar + EDGE, NARROWEST))
        self._body = float(heights.sum() + above * len(heights))
        grid = self.add_gridspec(len(heights), columns, width_ratios=widths, height_ratios=heights)
        panels = [self.add_subplot(grid[cell]) for cell in cells]
        for axes, title, (line, column) in zip(panels, titles, cells, strict=True):
            self.sizes[axes] = widths[column], heights[line]
            self.name_panel(axes, title)
        self._panels, self._share = dict(zip(cells, panels, strict=True)), share
        return panels

    def name_panel(self, axes: Axes, title: str) -> None:
        """Set the title of a panel; a long one begins above the labels at its left, and is cut off if needed."""
        axes.set_title(" ")
        size, bold = float(rcParams["axes.titlesize"]), {"weight": "bold"}

        def write() -> None:
            box = axes.get_window_extent()
            room = box.width / self.dpi + em()
            is_long = text_width(title, size, **bold) > room
            if is_long:
                boxes = [other.get_window_extent() for other in self.sizes]
                starts = [other.x1 for other in boxes if other.x1 <= box.x0 and other.y0 < box.y1 and box.y0 < other.y1]
                room = (box.x1 - max(starts, default=0)) / self.dpi - em()
                axes.set_title("")
            text = shorten(title, room, size, **bold)
            axes.set_title(text, loc="right" if is_long else "left", parse_math=False)

        self.after_layout.append(write)

    def scale(
        self, shades: ScalarMappable, axes: Sequence[Axes], label: str, values: Sequence[NDArray[np.float64]] = ()
    ) -> None:
        """Add a colour bar beside panels; an end is pointed if some `values` lie beyond it."""
        finite = np.concatenate([array[np.isfinite(array)] for array in values]) if values else np.zeros(0)
        low, high = (float(end or 0) for end in shades.get_clim())
        below, above = (finite < low - 1e-9).any(), (finite > high + 1e-9).any()
        bottom, *_, top = sorted(end for panel in axes for end in panel.get_position().intervaly)
        share = (top - bottom) / (
            self.subplotpars.top - self.subplotpars.bottom
        )  # their share of the height, before the layout
        height = max(share * (self._body or 30.0), 4.0)
        length = min(height, 24.0)
        bar = self.colorbar(
            shades,
            ax=list(axes),
            shrink=length / height,
            aspect=length / 1.1,
            anchor=(0, 1),
            pad=0.02,
            extend="both" if below and above else "min" if below else "max" if above else "neither",
        )
        bar.set_label(wrap(label, length * em(), rcParams["axes.labelsize"]), parse_math=False)
        bar.outline.set(linewidth=rcParams["axes.linewidth"], edgecolor=RULE)

    def key(self, *entries: Artist | str) -> None:
        """Add entries to the legend, after those of labelled lines and bars; texts become notes below it."""
        self._entries += [entry for entry in entries if isinstance(entry, Artist)]
        self._notes += [entry for entry in entries if isinstance(entry, str)]

    def finish(self) -> Sheet:
        """Lay out the sheet; its panels keep these places. ConfigError if the requested width is too small."""
        for (line, column), axes in self._panels.items():  # inner panels have no labels of shared axes
            if "x" in self._share and (line + 1, column) in self._panels:
                axes.set_xlabel("")
                axes.tick_params(labelbottom=False)
            if "y" in self._share and column:
                axes.set_ylabel("")
                axes.tick_params(labelleft=False)
        width, edge, style = self.get_figwidth(), EDGE * em() / 2, self.style
        head = [(self.title, "figure.titlesize", "bold", INK), (self.subtitle, "axes.labelsize", "normal", GREY)]
        notes = side_by_side(self._notes, width - 2 * edge, rcParams["font.size"])
        foot = [
            (notes, "font.size", "normal", INK),
            (self.signature * style.signature, "figure.labelsize", "normal", GREY),
        ]
        heading, footing = ([self._text(*text) for text in texts if text[0]] for texts in (head * style.title, foot))
        above, below = (sum(_height(text) + GAP * em() for text in texts) for texts in (heading, footing))
        legend = self._legend(width - 2 * edge)
        key = 0.0 if legend is None else legend.get_window_extent().height / self.dpi + em()
        body = self.get_figheight() if self._body is None else self._body * em()
        height = edge + above + body + key + below + edge
        if height > TALLEST:
            raise ConfigError(f"the figure is {height:.0f} inches high, of at most {TALLEST:.0f}; choose less to draw")
        self.set_figheight(height)
        for texts, top in ((heading, height - edge), (footing, edge + below)):
            for text in texts:
                text.set(x=edge, y=top, transform=self.dpi_scale_trans)
                top -= _height(text) + GAP * em()
        if legend is not None:
            legend.set_bbox_to_anchor((edge / width, (edge + below) / height), self.transFigure)
        # of its own, not the figure's: matplotlib draws a figure that has an engine a second time when it saves it
        engine = ConstrainedLayoutEngine(
            rect=(edge / width, (edge + below + key) / height, 1 - 2 * edge / width, body / height)
        )
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message="constrained_layout not applied")
                engine.execute(self)
        except UserWarning:
            smaller = "" if style.style == "paper" else f", or {flag.style} paper"
            raise ConfigError(f"{flag.width} {width:g} is too narrow for this figure; give more{smaller}") from None
        for axes in self.axes:  # rounded, as the solver's last digits differ from run to run and files must not
            bounds = axes.get_position(original=True)
            axes.set_position(Bbox(bounds.get_points().round(5)))
        for step in self.after_layout:
            step()
        return self

    def _text(self, text: str, size: Any, weight: str, color: str) -> Text:
        points = float(rcParams[size])
        lines = wrap(text, self.get_figwidth() - EDGE * em(), points, weight=weight)
        return self.text(0, 0, lines, size=points, weight=weight, color=color, va="top", parse_math=False)

    def _legend(self, room: float) -> Any:
        """The legend: labelled lines and bars, then the other entries, in as many columns as fit."""
        entries: dict[str, Any] = {}
        for axes in self.axes:
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                entries.setdefault(label, handle)
        entries |= {str(entry.get_label()): entry for entry in self._entries}
        if not entries:
            return None
        size = float(rcParams["legend.fontsize"])
        labels = [wrap(label, room - 4 * em(), size) for label in entries]
        widest = max(text_width(line, size) for label in labels for line in label.split("\n")) + 4.2 * em()
        columns = min(max(1, int(room // widest)), len(labels))
        columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))  # so that columns have about equal length
        legend = self.legend(list(entries.values()), labels, ncols=columns, loc="lower left")
        legend.set_in_layout(False)
        for text in legend.get_texts():
            text.set_parse_math(False)
        return legend


def swatch(color: str, meaning: str, *, hatch: str = "") -> Artist:
    """A legend entry for an area."""
    return Patch(facecolor=color, edgecolor=RULE, linewidth=0.4, hatch=hatch, label=meaning)


def stroke(color: str, meaning: str, line: Any = "-", **look: Any) -> Artist:
    """A legend entry for a line or a mark."""
    return Line2D([], [], color=color, linestyle=line, label=meaning, **look)


def em() -> float:
    """Inches of an em in the style in use."""
    return float(rcParams["font.size"]) / 72


@lru_cache(maxsize=4096)
def text_width(text: str, size: float, *, weight: str = "normal") -> float:
    """Width in inches of one line of text."""
    font = FontProperties(family="DejaVu Sans", size=size, weight=weight)
    width, _, _ = text_to_path.get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 72


def shorten(text: str, width: float, size: float, *, weight: str = "normal") -> str:
    """The text, shortened with an ellipsis until it fits a width in inches."""
    short = text
    while len(short) > 1 and text_width(short + "…" * (short != text), size, weight=weight) > width:
        short = short[:-1]
    return short if short == text else short.rstrip() + "…"


def wrap(text: str, width: float, size: float, *, weight: str = "normal") -> str:
    """The text in lines of about a width in inches, broken at spaces, after pipes, or within a long word."""
    lines = []
    for line in text.split("\n"):
        letters = int(0.95 * len(line) * width / max(text_width(line, size, weight=weight), 1e-9))
        lines += textwrap.wrap(line.replace("|", "|\0 "), max(letters, 8)) if letters < len(line) else [line]
    return "\n".join(lines).replace("|\0 ", "|").replace("|\0", "|")


def side_by_side(texts: Sequence[str], width: float, size: float) -> str:
    """Texts in lines of about a width in inches, with as many texts in a line as fit."""
    lines: list[str] = []
    for text in texts:
        if lines and text_width(f"{lines[-1]}     {text}", size) <= 0.95 * width:
            lines[-1] += f"     {text}"
        else:
            lines += wrap(text, width, size).split("\n")
    return "\n".join(lines)


def _height(text: Text) -> float:
    return float(text.get_window_extent().height) / float(text.get_figure(root=True).dpi)  # type: ignore[union-attr]
