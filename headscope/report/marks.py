"""Marks and colours of functions of heads, of methods of ranking and pruning, and of sites.

Each family of labels (`positional:-1;syntactic:nsubj>;rare`) has its own glyph, letter and colour (Okabe and Ito's
palette), so that figures can be read in any size and without colour vision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from matplotlib.artist import Artist
from matplotlib.colors import to_rgb

from headscope.config.declarations import HeadFunction, criterion_names, head_functions, measured_columns
from headscope.pruning.options.choice import learners
from headscope.report.sheet import swatch, text_width

# head word and dependent as Voita et al. 2019 abbreviate them
ENDS = {"nsubj": ("v", "s"), "obj": ("v", "o"), "dobj": ("v", "o"), "amod": ("n", "a"), "advmod": ("v", "a")}
LONG = 4  # letters of a relation's name that a mark can show


@dataclass(frozen=True)
class Function:
    """One label of one head."""

    family: HeadFunction
    detail: str

    @property
    def letters(self) -> str:
        """The text beside the glyph: `−1`, `v→s`, `r`."""
        if self.family.detail == "offset" and self.detail.lstrip("+-").isdigit():
            return signed_offset(self.detail)
        if self.family.detail == "relation" and self.detail:
            return arrow(self.detail)
        return self.family.letter

    @property
    def texts(self) -> tuple[str, str, str]:
        """The mark, its letters and its glyph alone, from the fullest to the shortest."""
        return self.family.glyph + self.letters, self.letters, self.family.glyph

    @property
    def meaning(self) -> str:
        """The meaning of the mark: of relations their own, else that of the family."""
        if self.family.detail != "relation" or not self.detail:
            return self.family.meaning
        relation = self.detail.rstrip("<>")
        return f"{relation}, dependent to head" if self.detail.endswith("<") else f"{relation}, head to dependent"


def functions_of(labels: object) -> tuple[Function, ...]:
    """The functions in one cell of the `functions` column; an unknown family keeps its first letter."""
    functions = []
    families = head_functions()
    for label in filter(None, (part.strip() for part in str(labels or "").split(";"))):
        name, _, detail = label.partition(":")
        short = name.strip().lower()
        family = families.get(short) or families.get(short.removesuffix("_token"))
        family = family or HeadFunction(short, "✚", short[:1] or "?", "#999999", short.replace("_", " "))
        functions.append(Function(family, detail))
    return tuple(dict.fromkeys(functions))


def signed_offset(offset: str | int) -> str:
    """`-1` as `−1` (with a minus sign), `2` as `+2`."""
    return f"{int(offset):+}".replace("-", "−").replace("+0", "0")


def arrow(label: str) -> str:
    """`nsubj>` (verb to its subject) as `v→s`, `nsubj<` as `s→v`, `det>` as `→det`, `det<` as `det→`."""
    relation, forward = label.rstrip("<>"), not label.endswith("<")
    head, dependent = ENDS.get(relation, ("", relation.partition(":")[0][:LONG]))
    return f"{head}→{dependent}" if forward else f"{dependent}→{head}"


def fit(function: Function, width: float, size: float) -> str:
    """The fullest of mark, letters and glyph that is no wider than `width` inches."""
    return next((text for text in function.texts if text_width(text, size) <= width), function.texts[-1])


def contrast(color: str | Iterable[float]) -> str:
    """Black or white, whichever is easier to read on `color` (WCAG relative luminance)."""
    channels = to_rgb(color) if isinstance(color, str) else tuple(color)[:3]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in channels]
    return "black" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.179 else "white"


def function_entries(functions: Iterable[Function], *, with_colors: bool) -> list[Artist | str]:
    """A legend entry for each family of functions, or for each of its relations, in the order of families."""
    order = {family: rank for rank, family in enumerate(head_functions().values())}
    entries: dict[str, Artist | str] = {}
    for function in sorted(
        set(functions),
        key=lambda function: (order.get(function.family, len(order)), function.family.name, function.detail),
    ):
        has_relation = function.family.detail == "relation" and function.detail
        mark = function.texts[0] if has_relation else function.family.glyph + function.family.letter
        entry = f"{mark}  {function.meaning}"
        entries.setdefault(function.meaning, swatch(function.family.color, entry) if with_colors else entry)
    return list(entries.values())


COLORS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#7f3fbf", "#8c6d1f", "#882255", "#44aa99", "#999933", "#dd1c77", "#74a00b", "#fb8072", "#4c6cd4", "#b15928"),
    "#a05195",
)
"""Okabe and Ito's colours without yellow (too light) and black (hidden on a dark page), and eleven more."""
SITE_COLORS = {"encoder-self": "#0072b2", "decoder-self": "#d55e00", "cross": "#009e73"}
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
CHANCE = "#999999"
"""Grey, for random choices only."""


def color_of(number: int) -> str:
    """The colour of a run or head by its number; colours repeat."""
    return COLORS[number % len(COLORS)]


class MethodStyle(NamedTuple):
    """The style of a method in figures."""

    color: str
    mark: str


def method_style(name: str) -> MethodStyle:
    """The colour and the mark of a method; random choices are grey, others get a colour by their name."""
    if re.match(r"random\b", name):
        return MethodStyle(CHANCE, "o")
    styles, number = _method_styles(), sum(map(ord, name))
    colors = {_family(method): style.color for method, style in styles.items()}
    return styles.get(name) or MethodStyle(colors.get(_family(name), color_of(number)), MARKS[number % len(MARKS)])


@cache
def _method_styles() -> dict[str, MethodStyle]:
    """The styles of all declared methods: a colour for each family, and different marks for the same colour."""
    ranking = [measure for _, measure in measured_columns().values() if measure.keep]
    overview = sorted((measure for measure in ranking if measure.overview), key=lambda measure: measure.overview)
    criteria = (name for name in criterion_names() if name != "random")
    methods = (*learners(), *(measure.name for measure in overview), *criteria, *(measure.name for measure in ranking))
    families = list(dict.fromkeys(map(_family, methods)))
    styles: dict[str, MethodStyle] = {}
    for name in dict.fromkeys(methods):
        color = color_of(families.index(_family(name)))
        alike = sum(style.color == color for style in styles.values())
        styles[name] = MethodStyle(color, MARKS[alike % len(MARKS)])
    return styles


def _family(name: str) -> str:
    return re.split(r"[^a-z0-9]", name, maxsplit=1)[0]
