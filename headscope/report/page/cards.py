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
SENTENCE = "description"
VISIBLE = 0.005  # shares below are not named
KINDS = {
    "lexical": "the word types scored highest",
    "surprising": "looked at far more than position expects",
}


def card_parts(run: Study) -> dict[int, dict[str, Any]]:
    """Of every head that was described: sentence, shares as a bar, examples and pairs; empty where none was.

    `bar` has a part for every group of the figure: title, place of its colour, share, and left end and width in
    percent of the bar; what no group explains is left.
    """
    if SENTENCE not in run.heads or "explained" not in run.heads:
        return {}
    examples, pairs = (
        {row: [cell(own, run.marks) for own in rows.to_dict("records")] for row, rows in rows_by_head(run, name)}
        for name, cell in (("examples", _example), ("token_pairs", _pair))
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
    if not math.isfinite(head["explained"]):
        return []
    left, parts = 0.0, []
    for place, (group, (title, _)) in enumerate(PARTS.items()):
        share = min(max(np.nan_to_num(head.get(f"explained_{group}", 0.0)), 0), 1 - left)
        if share >= VISIBLE:
            parts.append([title, f"g{place}", number_text(share, 2), f"{100 * left:.1f}", f"{100 * share:.1f}"])
        left += share
    return parts


def rows_by_head(run: Study, name: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of a table, by the number of their head in `heads`; nothing where the run lacks the table."""
    try:
        table = run.table(name)
    except MissingTable:
        return
    places = run.heads[list(HEAD_COLUMNS)].assign(index=range(len(run.heads)))
    for index, rows in table.merge(places, on=list(HEAD_COLUMNS), how="inner").groupby("index"):
        yield int(str(index)), rows


def _pair(row: Mapping[Any, Any], marks: Marks) -> list[Any]:
    ends = " → ".join(shown(str(row[end]), marks) for end in ("query", "key"))
    numbers = (f"{name} {number_text(row[name])}" for name in ("score", "weight", "count"))
    return [KINDS.get(row["kind"], row["kind"]), ends, ", ".join(numbers)]


def _example(row: Mapping[Any, Any], marks: Marks) -> dict[str, Any]:
    """The words about a query and about its key, each with which of them it is; of cross attention an arrow between.

    Positions count the tokens of a side from 0. Left-out words are one "…".
    """
    ends = {end: int(row[f"{end}_position"]) for end in ("query", "key")}
    words = {end: {**window(str(row[f"{end}_text"]), at), at: str(row[end])} for end, at in ends.items()}
    one = str(row["site"]).endswith("self")
    found: list[tuple[str, str]] = []
    for sides in (tuple(ends),) if one else (("query",), ("key",)):
        found += [("→", "")] if found else []
        known = {place: word for end in sides for place, word in words[end].items()}
        near = [place for place in sorted(known) if any(abs(place - ends[end]) <= NEAR for end in sides)]
        for before, place in zip([near[0] - 1, *near], near, strict=False):
            found += [("…", "")] if place - before > 1 else []
            found.append((shown(known[place], marks), " ".join(end for end in sides if ends[end] == place)))
    return {"line": int(row["sentence"]) + 1, "weight": number_text(row["weight"], 2), "words": found}


def window(text: str, at: int) -> dict[int, str]:
    """The words of a window of examples.csv by their places; the word at place `at` is the one in brackets.

    None where words hold spaces, so that they have no sure places.
    """
    start = max(0, at - WINDOW // 2)
    words = text.removeprefix("… " if start else "").removesuffix(" …").split(" ")
    middle = words[at - start] if at - start < len(words) else ""
    if not (len(middle) > 2 and middle[0] == "[" and middle[-1] == "]" and len(words) <= WINDOW):
        return {}
    return {start + place: word for place, word in enumerate(words)}
