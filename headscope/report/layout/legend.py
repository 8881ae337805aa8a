"""What marks, lines and colours mean: entries set in lines below a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headscope.report.layout.families import contrast
from headscope.report.layout.methods import method_style
from headscope.report.layout.page import INK, TICK, Flow, Page, Swatch, flow, text_width, wrap

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
