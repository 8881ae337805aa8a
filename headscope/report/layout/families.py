"""Function labels of heads (`positional:-1;syntactic:nsubj>;rare`) and how figures draw them.

Each family has a glyph, a letter and a colour of its own (Okabe and Ito's palette), so that neither
colour vision nor size decides whether a figure can be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from matplotlib.colors import to_rgb

from headscope.engine.declarations import HeadFunction, head_functions
from headscope.report.layout.page import text_width

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
