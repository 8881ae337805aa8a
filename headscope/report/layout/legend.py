"""What marks, lines and colours mean: entries set in lines below a figure, and function labels of heads.

Of labels (`positional:-1;syntactic:nsubj>;rare`) each family has a glyph, a letter and a colour of its own (Okabe and
Ito's palette), so that neither colour vision nor size decides whether a figure can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from matplotlib.colors import to_rgb

from headscope.config.declarations import HeadFunction, criterion_names, head_functions, measured_columns
from headscope.pruning.options.learn import learners
from headscope.report.layout.page import INK, TICK, Flow, Page, Swatch, flow, text_width, wrap

# head word and dependent as Voita et al. 2019 abbreviate them
ENDS = {"nsubj": ("v", "s"), "obj": ("v", "o"), "dobj": ("v", "o"), "amod": ("n", "a"), "advmod": ("v", "a")}
LONG = 4  # letters of a relation's name that a mark can show


@dataclass(frozen=True)
class Function:
    """One label of one head."""

    family: HeadFunction
    detail: str
    hollow: bool = False
    """Whether only the estimate would give it: drawn in brackets, without a colour behind."""

    @property
    def glyph(self) -> str:
        """That of the family."""
        return f"({self.family.glyph})" if self.hollow else self.family.glyph

    @property
    def short(self) -> str:
        """`−1`, `v→s`, `r`: what is written beside the glyph."""
        return f"({self._letters})" if self.hollow else self._letters

    @property
    def _letters(self) -> str:
        if self.family.detail == "offset" and self.detail:
            return signed(self.detail)
        if self.family.detail == "relation" and self.detail:
            return arrow(self.detail)
        return self.family.letter

    @property
    def mark(self) -> str:
        """Glyph and letters."""
        mark = self.family.glyph + self._letters
        return f"({mark})" if self.hollow else mark


def functions_of(labels: object, *, hollow: bool = False) -> tuple[Function, ...]:
    """The functions in one cell of the `functions` column; an unknown family keeps its first letter.

    `hollow` reads the column `functions_unsupported`, in which every label has a reason in brackets.
    """
    functions = []
    for label in filter(None, (part.strip() for part in str(labels or "").split(";"))):
        name, _, detail = (label.partition(" (")[0] if hollow else label).partition(":")
        short = name.strip().lower()
        families = head_functions()
        family = families.get(short) or families.get(short.removesuffix("_token"))
        family = family or HeadFunction(short, "✚", short[:1] or "?", "#999999", short.replace("_", " "))
        functions.append(Function(family, detail, hollow))
    return tuple(dict.fromkeys(functions))


def signed(offset: str) -> str:
    """`-1` as `−1`, `2` as `+2`: with a sign that is as wide as the plus."""
    value = offset.lstrip("+-−")
    if value.strip("0") == "":
        return "0"
    return ("−" if offset[0] in "-−" else "+") + value


def arrow(label: str) -> str:
    """`nsubj>` (verb to its subject) as `v→s`, `nsubj<` as `s→v`, `det>` as `→det`, `det<` as `det→`."""
    relation, forward = label.rstrip("<>"), not label.endswith("<")
    head, dependent = ENDS.get(relation, ("", relation.partition(":")[0][:LONG]))
    return f"{head}→{dependent}" if forward else f"{dependent}→{head}"


def fit(function: Function, width: float, size: float) -> str:
    """The fullest of mark, letters and glyph that is no wider than `width` inches."""
    for text in (function.mark, function.short):
        if text_width(text, size) <= width:
            return text
    return function.glyph


def contrast(color: str | Iterable[float]) -> str:
    """Black or white, whichever is easier to read on `color` (WCAG relative luminance)."""
    channels = to_rgb(color) if isinstance(color, str) else tuple(color)[:3]
    red, green, blue = map(_linear, channels)
    return "black" if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.179 else "white"


def _linear(channel: float) -> float:
    return channel / 12.92 if channel <= 0.04045 else ((channel + 0.055) / 1.055) ** 2.4


def legend_entries(functions: Iterable[Function], *, boxed: bool) -> list[tuple[str, str, str]]:
    """One entry per family that occurs, then one per relation, in the families' order; what hollow ones are."""
    marks = set(functions)
    present = {replace(function, hollow=False) for function in marks}
    families = head_functions().values()
    order = [*families, *sorted({f.family for f in present} - set(families), key=str)]
    entries = []
    for family in (family for family in order if any(f.family == family for f in present)):
        color = family.color if boxed else ""
        details = sorted({f for f in present if f.family == family and f.detail}, key=lambda f: f.detail)
        if family.detail == "relation" and details:
            entries += [(f.mark, color, _relation(f.detail)) for f in details]
        else:
            entries.append((family.glyph + family.letter, color, family.meaning))
    if any(function.hollow for function in marks):
        entries.append(("(  )", "", "by the estimate alone; the evidence does not suffice"))
    return entries


def _relation(label: str) -> str:
    relation = label.rstrip("<>")
    return f"{relation}, dependent to head" if label.endswith("<") else f"{relation}, head to dependent"


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
