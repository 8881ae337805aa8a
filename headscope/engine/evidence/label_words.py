"""Labels in words, each with the number that was measured, and what that is a number of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headscope.bootstrap import Array
from headscope.config.declarations import head_functions
from headscope.description.pair_function import PAIR_FUNCTIONS

IN_WORDS = {
    "aligned:predicted": "looks at the source word of the token being predicted",
    "aligned:fed": "looks at the source word of the token that was fed",
    "aligned:successor": "looks at the word after the source word of the token that was fed",
    "averages:after": "gives what follows even weight",
    "averages:before": "gives what precedes even weight",
}
PARTS = {"q": "queries", "k": "keys", "v": "values"}


def label_in_words(label: str) -> str:
    """What a head with a label does: `positional:-1` → looks at the token before.

    The meaning of its function, but for the detail that some labels have; the label itself where no analysis declares
    its function.
    """
    kind, _, detail = label.partition(":")
    if label in IN_WORDS:
        return IN_WORDS[label]
    if kind == "positional" and detail:
        return _offset(int(detail))
    if kind == "looks" and detail in PAIR_FUNCTIONS.names():
        return f"looks at {PAIR_FUNCTIONS.get(detail).meaning}"
    if kind == "syntactic" and detail:
        ends = ("head", "dependent") if detail.endswith(">") else ("dependent", "head")
        return f"looks from {ends[0]} to {ends[1]} along {detail[:-1]}"
    if kind.endswith("-composition") and kind[0] in PARTS and detail:
        return f"its {PARTS[kind[0]]} read what head {detail} writes"
    function = head_functions().get(kind)
    return function.meaning.removeprefix(f"{kind}: ") if function else label


def _offset(offset: int) -> str:
    if offset == 0:
        return "looks at the token itself"
    where = "before" if offset < 0 else "after"
    return f"looks at the token {where}" if abs(offset) == 1 else f"looks {abs(offset)} tokens {where}"


@dataclass(frozen=True)
class Rate:
    """What the number of a label is `of` ("of its largest weights"), and what its baseline is ("by chance").

    `value` and `baseline` [h] or [h c] are said where they are not those that were tested.
    """

    of: str
    against: str = "by chance"
    value: Array | None = None
    baseline: Array | None = None

    def phrase(self, label: str, value: float, baseline: float) -> str:
        """A label in words with its number: "…: 0.72 of the words, 0.35 by chance"."""
        text = f"{label_in_words(label)}: {value:.2f} {self.of}"
        return text if np.isnan(baseline) else f"{text}, {baseline:.2f} {self.against}"
