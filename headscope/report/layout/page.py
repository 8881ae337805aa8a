"""A figure whose parts are placed in inches from the top left corner of its body.

matplotlib's automatic layouts trade cell size for labels; a map of 384 heads needs the reverse: cells
and letters of known size, and a page that grows around them. The page adds the title, the line about
model and data, and the signature as a footer, all wrapped to its width.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, ScalarFormatter
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.report.layout.output import MARGIN, FigureStyle, current_style, enlarge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, GREY, PALE, RULE = "#222222", "#777777", "#f0f0f0", "#bbbbbb"
TITLE, LABEL, TICK, FOOT = 10.0, 7.5, 6.5, 6.0  # letter sizes in points
NARROWEST = 4.6  # inches: a page below this has no room for its title
BAR = 0.62  # inches a colour bar takes with its ticks and label


Dashes = Literal["-", "--", ":"]


@dataclass(frozen=True)
class Swatch:
    """A piece of a line as panels draw it, with its mark in the middle; or a `band`, a piece of a filled area."""

    line: Dashes = "-"
    mark: str = ""
    filled: bool = True
    width: float = 1.2
    band: bool = False


class Page:
    """A figure with header and footer; `axes` and `text` place things in inches inside its body.

    The style that holds says whether title and signature are there, and how wide the page is.
    """

    def __init__(self, width: float, height: float, *, title: str, subtitle: str, footer: str) -> None:
        style = current_style()
        width = _page_width(width, style)
        header, foot = [], wrap(footer, width, FOOT) if style.signature else []
        if style.title:
            header += [(line, TITLE, INK, "bold") for line in wrap(title, width, TITLE, weight="bold")]
            header += [(line, LABEL, GREY, "normal") for line in wrap(subtitle, width, LABEL)]
        self.top = MARGIN + sum(_leading(size) for _, size, _, _ in header) + 0.08 * bool(header)
        self.width, self.body = width, height
        self.height = self.top + height + (0.14 + len(foot) * _leading(FOOT)) * bool(foot) + MARGIN
        self.figure = Figure(figsize=(width + 2 * MARGIN, self.height), facecolor="white")
        y = MARGIN - self.top
        for line, size, color, weight in header:
            self.text(0, y, line, size=size, color=color, weight=weight)
            y += _leading(size)
        for number, line in enumerate(foot):
            self.text(0, height + 0.14 + number * _leading(FOOT), line, size=FOOT, color=GREY)

    def finished(self) -> Figure:
        """The figure, in the size of its style."""
        enlarge(self.figure, current_style().scale)
        return self.figure

    def axes(self, left: float, top: float, width: float, height: float) -> Axes:
        """Axes whose upper left corner is at (left, top) of the body."""
        full_width = self.figure.get_figwidth()
        bottom = self.height - self.top - top - height
        box = ((MARGIN + left) / full_width, bottom / self.height, width / full_width, height / self.height)
        axes = self.figure.add_axes(box)
        axes.tick_params(length=0, pad=2.5, labelsize=TICK, labelcolor=INK)
        for spine in axes.spines.values():
            spine.set(linewidth=0.5, color=RULE)
        return axes

    def text(
        self, left: float, top: float, text: str, *, size: float = LABEL, color: str = INK, weight: str = "normal"
    ) -> None:
        """One line whose upper left corner is at (left, top) of the body; `$` is just a letter."""
        x = (MARGIN + left) / self.figure.get_figwidth()
        y = 1 - (self.top + top) / self.height
        self.figure.text(x, y, text, size=size, color=color, weight=weight, va="top", ha="left", parse_math=False)

    def box(self, left: float, top: float, width: float, height: float, color: str, *, hatch: str = "") -> None:
        """A filled rectangle, behind the text."""
        full_width = self.figure.get_figwidth()
        corner = ((MARGIN + left) / full_width, (self.height - self.top - top - height) / self.height)
        self.figure.add_artist(
            Rectangle(
                corner,
                width / full_width,
                height / self.height,
                facecolor=color,
                edgecolor=RULE,
                linewidth=0.4,
                hatch=hatch or None,
                transform=self.figure.transFigure,
                zorder=0,
            )
        )

    def line(self, left: float, top: float, width: float, color: str, look: Swatch) -> None:
        """A level piece of a line from (left, top) of the body, with its mark in the middle."""
        full_width = self.figure.get_figwidth()
        xs = [(MARGIN + left + part * width) / full_width for part in (0, 0.5, 1)]
        y = 1 - (self.top + top) / self.height
        line = Line2D(
            xs, [y] * 3, linestyle=look.line, linewidth=look.width, color=color, transform=self.figure.transFigure
        )
        line.set(marker=look.mark or "None", markevery=[1], markersize=4, markeredgewidth=0.8)
        if not look.filled:
            line.set_markerfacecolor("white")
        self.figure.add_artist(line)

    def color_bar(
        self,
        left: float,
        top: float,
        height: float,
        shades: ScalarMappable,
        *,
        label: str,
        unit: str = "",
        values: Sequence[NDArray[np.float64]] = (),
    ) -> None:
        """A slim bar; where it is shorter than the words of its label the unit alone stands there, if that fits.

        It has a point at an end beyond which some of the `values` lie.
        """
        axes = self.axes(left, top, 0.1, height)
        finite = np.concatenate([array[np.isfinite(array)] for array in values]) if values else np.zeros(0)
        low, high = shades.get_clim()
        below, above = ((finite < (low or 0) - 1e-9).any(), (finite > (high or 0) + 1e-9).any())
        bar = self.figure.colorbar(
            shades,
            cax=axes,
            ticks=MaxNLocator(5 if height > 0.8 else 2),
            extend="both" if below and above else "min" if below else "max" if above else "neither",
            extendfrac=min(0.04, 0.05 / height),
        )
        bar.formatter = ScalarFormatter(useOffset=False)  # an offset would be printed over the panel's title
        bar.update_ticks()
        bar.outline.set(linewidth=0.4, edgecolor=RULE)
        axes.tick_params(length=1.5, width=0.4, pad=1.5, labelsize=TICK, color=RULE)
        fitting = [text for text in (label, unit) if text and text_width(text, LABEL) <= height + 0.2]
        if fitting:
            axes.set_ylabel(fitting[0], size=LABEL, color=INK, labelpad=3, parse_math=False)


@dataclass(frozen=True)
class Flow:
    """Boxes set like words in lines: the upper left corner of each, and the size of all."""

    corners: list[tuple[float, float]]
    width: float
    height: float


def flow(
    sizes: Sequence[tuple[float, float]],
    width: float,
    *,
    gap: tuple[float, float] = (0.2, 0.2),
    breaks: frozenset[int] = frozenset(),
) -> Flow:
    """Fill lines from the left until `width` is used up; a box in `breaks` always starts a line."""
    corners: list[tuple[float, float]] = []
    left = top = tallest = widest = 0.0
    for number, (wide, tall) in enumerate(sizes):
        if left and (number in breaks or left + wide > width + 1e-9):
            left, top, tallest = 0.0, top + tallest + gap[1], 0.0
        corners.append((left, top))
        widest, tallest = max(widest, left + wide), max(tallest, tall)
        left += wide + gap[0]
    return Flow(corners, widest, top + tallest)


def even_width(count: int, box: float, width: float, *, gap: float = 0.2) -> float:
    """The width, at most `width`, at which `count` equal boxes fill their lines most evenly."""
    fit = max(1, int((width + gap + 1e-9) // (box + gap)))
    lines = -(-count // fit)
    columns = -(-count // max(lines, 1))
    return columns * (box + gap) - gap


def text_width(text: str, size: float, *, weight: str = "normal") -> float:
    """Width in inches of one line of text."""
    return sum(_advance(letter, weight) for letter in text) * size / 72


def wrap(text: str, width: float, size: float, *, weight: str = "normal") -> list[str]:
    """Lines no wider than `width` inches: broken after spaces and pipes, inside a word where it must be."""
    if "\n" in text:
        return [line for part in text.split("\n") for line in wrap(part, width, size, weight=weight)]
    width *= 0.97  # letters of a few pixels are set a little wider than the font says
    lines, line = [], ""
    for token in _breakable(text, width, size, weight):
        if line and text_width((line + token).rstrip(), size, weight=weight) > width:
            lines.append(line.rstrip())
            line = ""
        line += token
    return [*lines, line.rstrip()] if line.strip() else lines


def shorten(text: str, width: float, size: float, *, weight: str = "normal") -> str:
    """The text, shortened with an ellipsis until it fits."""
    short = text
    while len(short) > 1 and text_width(short + "…" * (short != text), size, weight=weight) > width:
        short = short[:-1]
    return short if short == text else short + "…"


def _page_width(width: float, style: FigureStyle) -> float:
    """Inches between the margins; ConfigError where those that were asked for are too few."""
    if style.room is None:
        return max(width, NARROWEST)
    if width > style.room + 0.01:
        least = (width + 2 * MARGIN) * style.scale
        smaller = "" if style.name == "paper" else ", or --style paper"
        raise ConfigError(f"--width {style.width:g} is too narrow for this figure; give at least {least:.1f}{smaller}")
    return style.room


def _breakable(text: str, width: float, size: float, weight: str) -> list[str]:
    tokens: list[str] = []
    for token in re.findall(r"[^\s|]*[\s|]?", text):
        start = 0
        for end in range(1, len(token) + 1):
            if text_width(token[start:end], size, weight=weight) > width and end - start > 1:
                tokens.append(token[start : end - 1])
                start = end - 1
        tokens.append(token[start:])
    return tokens


def _leading(size: float) -> float:
    return size * 1.35 / 72


@lru_cache(maxsize=4096)
def _advance(letter: str, weight: str) -> float:
    """Width of one letter in units of its size; letters that the font lacks are taken as a full square."""
    font = get_font(findfont(FontProperties(family="DejaVu Sans", weight=weight)))
    if not font.get_char_index(ord(letter)):
        return 1.0
    font.set_size(100, 72)
    advance: float = font.load_char(ord(letter)).linearHoriAdvance
    return advance / 65536 / 100
