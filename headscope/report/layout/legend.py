"""What marks, lines and colours mean: entries set in lines below a figure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from headscope.engine.declarations import criterion_names, measured_columns
from headscope.pruning.options.learn import learners
from headscope.report.layout.families import contrast
from headscope.report.layout.page import INK, TICK, Flow, Page, Swatch, flow, text_width, wrap

COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7f3fbf", "#8c6d1f", "#882255", "#44aa99", "#999933", "#dd1c77", "#74a00b", "#fb8072", "#4c6cd4", "#b15928"),
)
"""Okabe and Ito's colours but yellow, too light for lines, and black, which a dark page hides; and ten more."""
SITE_COLORS = {"encoder-self": "#0072b2", "decoder-self": "#d55e00", "cross": "#009e73"}
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
CHANCE = "#999999"
"""Grey is of random choices, and of nothing else."""


@dataclass(frozen=True)
class MethodStyle:
    """How a method is drawn."""

    color: str
    mark: str


def method_style(name: str) -> MethodStyle:
    """The colour and the mark of a method; random choices are grey, methods that nothing declares come last."""
    if re.fullmatch(r"random\b.*", name):
        return MethodStyle(CHANCE, "o")
    table = _table()
    if name in table:
        return table[name]
    number = sum(map(ord, name))
    relative = table.get(_family(name, table))
    return MethodStyle(relative.color if relative else COLORS[number % len(COLORS)], MARKS[number % len(MARKS)])


@cache
def _table() -> dict[str, MethodStyle]:
    """Every method that there is: a colour for each family, and marks that tell apart what has the same colour."""
    families: list[str] = []
    colors: list[str] = []
    table = {}
    ranking = [measure for _, measure in measured_columns().values() if measure.keep]
    shown = sorted((measure for measure in ranking if measure.overview), key=lambda measure: measure.overview)
    criteria = (name for name in criterion_names() if name != "random")
    named = (*learners(), *(measure.name for measure in shown), *criteria, *(measure.name for measure in ranking))
    for name in dict.fromkeys(named):
        family = _family(name, families)
        if family not in families:
            families.append(family)
        color = COLORS[families.index(family) % len(COLORS)]
        table[name] = MethodStyle(color, MARKS[colors.count(color) % len(MARKS)])
        colors.append(color)
    return table


def _family(name: str, known: Iterable[str]) -> str:
    """The shortest known name that this one begins with, up to the end of a word; else its own name."""
    begins = (family for family in known if re.match(rf"{re.escape(family)}(?![a-z0-9])", name))
    return min(begins, key=len, default=name)


HIGH = 0.13  # inches of a box


Entry = tuple[str | Swatch, str, str]
"""What stands in the figure, its colour (of letters: of the box behind them, empty for none), what it means."""


@dataclass(frozen=True)
class Legend:
    """Entries and where they stand."""

    entries: list[tuple[str | Swatch, str, list[str]]]
    """The meaning in lines."""
    flow: Flow

    @classmethod
    def plan(cls, entries: Sequence[Entry], width: float) -> Legend:
        """Measure the entries, so that the page can be made high enough."""
        lines = [wrap(text, width - _box(mark) - 0.06, TICK) for mark, _, text in entries]
        sizes = [
            (_box(mark) + 0.06 + max((text_width(line, TICK) for line in its), default=0), HIGH * max(len(its), 1))
            for (mark, _, _), its in zip(entries, lines, strict=True)
        ]
        wrapped = [(mark, color, its) for (mark, color, _), its in zip(entries, lines, strict=True)]
        return cls(wrapped, flow(sizes, width, gap=(0.22, 0.045)))

    @property
    def height(self) -> float:
        """Inches, nothing when there is nothing to explain."""
        return self.flow.height + 0.1 if self.entries else 0.0

    def draw(self, page: Page, top: float) -> None:
        """Write the entries into the page, from `top` down."""
        for (mark, color, meaning), (left, down) in zip(self.entries, self.flow.corners, strict=True):
            y = top + 0.1 + down
            if isinstance(mark, Swatch):
                _draw_swatch(page, mark, (left, y), color or INK)
            else:
                if color:
                    page.box(left, y, _box(mark), HIGH, color)
                page.text(left + 0.03, y + 0.012, mark, size=TICK, color=contrast(color) if color else "black")
            for number, line in enumerate(meaning):
                page.text(left + _box(mark) + 0.06, y + 0.012 + number * HIGH, line, size=TICK)


def method_entries(names: Sequence[str]) -> list[Entry]:
    """An entry for each method, in its colour and with its mark."""
    return [(Swatch(mark=method_style(name).mark), method_style(name).color, name) for name in names]


def _draw_swatch(page: Page, swatch: Swatch, corner: tuple[float, float], color: str) -> None:
    left, top = corner
    if swatch.band:
        page.box(left, top + 0.02, _box(swatch), HIGH - 0.04, color)
    else:
        page.line(left, top + HIGH / 2, _box(swatch), color, swatch)


def _box(mark: str | Swatch) -> float:
    return 0.26 if isinstance(mark, Swatch) else text_width(mark, TICK) + 0.06
