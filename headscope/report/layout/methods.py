"""One colour and one mark for every method by which heads are ranked or pruned, the same in all figures.

They follow from what is declared, not from what a figure shows: methods that learn gates first, then the measures of
every run's maps, then the criteria of pruning, then the other measures that rank heads. Methods of one family
(`lrp` and `lrp.csv`'s rule sets, `magnitude` and `magnitude_all`) have one colour and differ by their mark, and so do
families beyond the number of colours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from headscope.engine.declarations import criterion_names, measured_columns
from headscope.pruning.options.learn import learners

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
    for name in _declared():
        family = _family(name, families)
        if family not in families:
            families.append(family)
        color = COLORS[families.index(family) % len(COLORS)]
        table[name] = MethodStyle(color, MARKS[colors.count(color) % len(MARKS)])
        colors.append(color)
    return table


def _declared() -> tuple[str, ...]:
    """Every method that there is, in the order of colours."""
    ranking = [measure for _, measure in measured_columns().values() if measure.keep]
    shown = sorted((measure for measure in ranking if measure.overview), key=lambda measure: measure.overview)
    criteria = (name for name in criterion_names() if name != "random")
    named = (*learners(), *(measure.name for measure in shown), *criteria, *(measure.name for measure in ranking))
    return tuple(dict.fromkeys(named))


def _family(name: str, known: Iterable[str]) -> str:
    """The shortest known name that this one begins with, up to the end of a word; else its own name."""
    begins = (family for family in known if re.match(rf"{re.escape(family)}(?![a-z0-9])", name))
    return min(begins, key=len, default=name)
