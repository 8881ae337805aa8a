"""What every head does, as a card: a sentence, what explains it, examples as words with a line, pairs of words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.data.token_text import Marks, shown
from headscope.description.examples import WINDOW
from headscope.report.figures.explained import PARTS
from headscope.results.answer import number_text
from headscope.results.study import Study
from headscope.results.study_tables import HEAD_COLUMNS, MissingTable

NEAR = 3
"""Words that an example shows on either side of the query and of the key."""
ROOM = 15
"""Words that one line holds: between ends that lie further apart the rest is left out."""
SENTENCE = "description"
Line = list[str | None]
"""Words of an example; None for those that are left out."""


def card_parts(run: Study) -> dict[int, dict[str, Any]]:
    """Of every head that was described: sentence, shares as a bar, examples and pairs; empty where none was.

    `bar` has a part for every group of the figure: title, place of its colour, share, and left end and width in
    percent of the bar; what no group explains is left.
    """
    if SENTENCE not in run.heads or "explained" not in run.heads:
        return {}
    examples, pairs = (
        {
            row: [cell(own, run.marks) for own in rows.to_dict("records")]
            for row, rows in rows_by_head(run, name, *columns)
        }
        for (name, columns), cell in zip(NEEDED.items(), (_example, _pair), strict=True)
    )
    return {
        row: {
            "said": str(own[SENTENCE] or "") if own[SENTENCE] == own[SENTENCE] else "",
            "bar": _bar(own),
            "examples": examples.get(row, []),
            "pairs": pairs.get(row, []),
        }
        for row, own in enumerate(run.heads.to_dict("records"))
    }


def _bar(head: Mapping[Any, Any]) -> list[list[str]]:
    """The parts of a head's bar with a share to see; empty for a head without any."""
    if not math.isfinite(head["explained"]):
        return []
    left, parts = 0.0, []
    for place, (group, (title, _)) in enumerate(PARTS.items()):
        share = min(max(np.nan_to_num(head.get(f"explained_{group}", 0.0)), 0), 1 - left)
        if share >= VISIBLE:
            parts.append([title, f"g{place}", number_text(share, 2), f"{100 * left:.1f}", f"{100 * share:.1f}"])
        left += share
    return parts


VISIBLE = 0.005  # shares below are not named


def rows_by_head(run: Study, name: str, *columns: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of a table, by the number of their head in `heads`; nothing where the run lacks the table."""
    try:
        table = run.table(name, *columns)
    except MissingTable:
        return
    places = run.heads[list(HEAD_COLUMNS)].assign(index=range(len(run.heads)))
    for index, rows in table.merge(places, on=list(HEAD_COLUMNS), how="inner").groupby("index"):
        yield int(str(index)), rows


KINDS = {
    "lexical": "the word types scored highest",
    "surprising": "looked at far more than position expects",
}
NEEDED = {
    "examples": ("sentence", "weight", "query", "key", "query_position", "key_position", "query_text", "key_text"),
    "token_pairs": ("kind", "query", "key", "score", "weight", "count"),
}


def _pair(row: Mapping[Any, Any], marks: Marks) -> list[Any]:
    ends = " → ".join(shown(str(row[end]), marks) for end in ("query", "key"))
    numbers = (f"{name} {number_text(row[name])}" for name in ("score", "weight", "count"))
    return [KINDS.get(row["kind"], row["kind"]), ends, ", ".join(numbers)]


def _example(row: Mapping[Any, Any], marks: Marks) -> dict[str, Any]:
    """The words about a query and about its key: in one line for self attention, else in two; `ends` are their places.

    Positions count the tokens of a side from 0.
    """
    at = [int(row[f"{end}_position"]) for end in ("query", "key")]
    windows = [window(str(row[f"{end}_text"]), place) for end, place in zip(("query", "key"), at, strict=True)]
    for found, end, place in zip(windows, ("query", "key"), at, strict=True):
        found.setdefault(place, str(row[end]))
    if str(row["site"]).endswith("self"):
        lines = [_shown({**windows[0], **windows[1]}, at)]
    else:
        lines = [_shown(found, [place]) for found, place in zip(windows, at, strict=True)]
    number = [0, len(lines) - 1]
    ends = [[line, lines[line][0].index(place)] for line, place in zip(number, at, strict=True)]
    return {
        "line": int(row["sentence"]) + 1,
        "weight": number_text(row["weight"], 2),
        "words": [[word and shown(word, marks) for word in words] for _, words in lines],
        "ends": ends,
    }


def _shown(words: Mapping[int, str], at: list[int]) -> tuple[list[int | None], Line]:
    """Places and words from a little before the first of `at` to a little after the last."""
    first, last = min(at) - NEAR, max(at) + NEAR
    near = [place for place in sorted(words) if first <= place <= last]
    if last - first >= ROOM:
        near = [place for place in near if any(abs(place - end) <= NEAR for end in at)]
    places: list[int | None] = []
    for place in near:
        if places and place - 1 != places[-1]:
            places.append(None)
        places.append(place)
    return places, [None if place is None else words[place] for place in places]


def window(text: str, at: int) -> dict[int, str]:
    """The words of a window of examples.csv by their places; the word at place `at` is the one in brackets.

    None but that one where words hold spaces, so that the others have no sure places.
    """
    start = max(0, at - WINDOW // 2)
    words = text.removeprefix("… " if start else "").removesuffix(" …").split(" ")
    middle = words[at - start] if at - start < len(words) else ""
    if not (len(middle) > 2 and middle[0] == "[" and middle[-1] == "]" and len(words) <= WINDOW):
        return {}
    words[at - start] = middle[1:-1]
    return {start + place: word for place, word in enumerate(words)}
