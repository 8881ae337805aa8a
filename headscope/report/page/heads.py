"""The heads of a study as the page's script shows them: cards, tables, sentences with attention, order by each measure."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import pandas as pd

from headscope.config.declarations import Declaration, measure_of, measured_columns, pair_measures
from headscope.data.token_text import Marks, shown
from headscope.description.examples import WINDOW
from headscope.files.tables import Bytes, Example
from headscope.report.figures.layers import PARTS
from headscope.report.marks import functions_of
from headscope.results.answer import interval_text, number_text
from headscope.results.roles import role_of
from headscope.results.study import Study, sides_of
from headscope.results.study_answers import LEVEL, MEASURED, damage_words, joint_effects, main_importance
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


LEVELS = 63
"""Steps from 0 to 1: weights are (step / levels)², so that small ones are told apart."""
ROOM = 6_000_000
"""Letters of the page that all weights may take."""
FAINT = 0.01  # weights below are 0


def examples_data(examples: Sequence[Example]) -> dict[str, Any] | None:
    """The sentences with their weights, as many as there is room for; `percents` are the texts of the levels."""
    if not examples:
        return None
    packed = [_packed(example) for example in examples]
    sizes = [sum(len(site["packed"]) for site in sentence["sites"].values()) for sentence in packed]
    fitting = int((np.cumsum(sizes) <= ROOM).sum())
    percents = [f"{(step / LEVELS) ** 2:.0%}".replace("%", " %") for step in range(LEVELS + 1)]
    return {"percents": percents, "sentences": packed[:fitting], "left_out": len(packed) - fitting}


def _packed(example: Example) -> dict[str, Any]:
    sides = {side: list(subwords) for side, subwords in example.subwords.items()}
    sites = {
        site: {"sides": list(sides_of(site, sides)), "packed": pack(weights)}
        for site, weights in example.weights.items()
    }
    return {"line": example.number + 1, "texts": dict(example.texts), "subwords": sides, "sites": sites}


def pack(weights: Bytes) -> str:
    """Weights [n t s] as bytes 0 … 255 in steps, deflated, in base64."""
    # without a search for repetitions, of which attention has none: a hundred times as fast, and smaller
    stream = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    deflated = stream.compress(_STEPS[weights].tobytes()) + stream.flush()
    return base64.b64encode(deflated).decode("ascii")


_SHARES = np.arange(256) / 255
_STEPS = np.where(_SHARES < FAINT, 0, np.maximum(np.round(LEVELS * np.sqrt(_SHARES)), 1)).astype(np.uint8)
"""The step of every byte."""


MOST_ROWS, FEW_ROWS, ALIKE = 8, 2, 4
"""Rows of a table of a card, those that are shown as columns, and most similar heads."""
TOLD = {"heads", "examples", "token_pairs", "importance"}
"""Tables that a card tells in other words."""
LEADING = ("margin", "share", "score", "weight", "value")
"""Columns by the first of which rows of a table are the leading ones."""
DISTANCES = {"l2", "js"}
Rows = list[list[str]]
Tables = dict[int, list[tuple[str, list[str], Rows]]]


def run_data(study: Study, name: str) -> dict[str, Any]:
    """Everything of a study that the script shows."""
    found = measures(study)
    places: dict[str, int] = {}
    heads = []
    importance, tables, parts = need_rows(study, found), detail_tables(study), card_parts(study)
    joint, damage = joint_effects(study), damage_words(study)
    for row, (site, layer, head) in enumerate(study.heads[list(HEAD_COLUMNS)].itertuples(index=False, name=None)):
        full = f"{site}.{layer}.{head}"
        labels = labels_of(study, row, "functions")
        roles = list(dict.fromkeys(map(role_of, labels)))
        heads.append(
            {
                "name": full,
                "short": study.short_name(full),
                "place": [site, layer, head],
                "at": places.setdefault(site, 0),
                "labels": labels,
                "weak": labels_of(study, row, "functions_unsupported"),
                "need": importance[row],
                "joint": [f"{damage} if all heads of “{own}” are off: {joint[own]}" for own in roles if own in joint],
                "tables": tables.get(row, []),
                **parts.get(row, {}),
            }
        )
        places[site] += 1
    return {
        "name": name,
        "model": study.model,
        "sites": list(places),
        "heads": heads,
        "start": start(found),
        "measures": found,
        "examples": examples_data(study.examples),
    }


def start(found: list[dict[str, Any]]) -> int:
    """The head to begin with: the first one by the measure that is shown first."""
    leading = min((measure for measure in found if measure["lead"] is not None), key=itemgetter("lead"), default=None)
    return leading["places"].index(1) if leading and 1 in leading["places"] else 0


def labels_of(study: Study, row: int, column: str) -> list[str]:
    """The labels in a cell of `functions` or `functions_unsupported`."""
    cell = study.heads[column].iloc[row] if column in study.heads else ""
    return [label.strip() for label in str(cell or "").split(";") if label.strip()]


def marks(labels: set[str]) -> tuple[dict[str, list[Any]], dict[str, tuple[str, str]]]:
    """How labels are written short, `{label: [glyph and letters, style class, role]}`, and `{class: colours}`.

    Of a label without evidence the reason in brackets is no part of the mark.
    """
    found: dict[str, list[Any]] = {}
    colors: dict[str, tuple[str, str]] = {}
    for label in sorted(labels):
        bare = label.partition(" (")[0]
        function = functions_of(bare)[0]
        name = f"f{list(colors).index(function.family.name)}" if function.family.name in colors else f"f{len(colors)}"
        colors.setdefault(function.family.name, (name, function.family.color))
        found[label] = [function.family.glyph, function.letters, name, role_of(bare)]
    return found, colors


def measures(study: Study) -> list[dict[str, Any]]:
    """Every column of numbers as texts with intervals; `places` count from the head that ranks first, `among` whom.

    Shares within a layer have places within it. `lead` orders those that are shown first; these have shades on the map.
    """
    declared, first, found = measured_columns(), main_importance(study), []
    layers = [study.heads[name] for name in ("site", "layer")]
    for column in study.measures:
        analysis = declared[column][0] if column in declared else Declaration("")
        measure, values = measure_of(column), study.heads[column].astype(float)
        groups = values.groupby(layers) if measure.within_layer else values
        places = groups.rank(method="min", ascending=measure.keep == "lowest")
        ends = [study.heads.get(f"{column}_{end}", values) for end in ("low", "high")]
        known = np.isfinite(values)
        lead = 0 if first and column == first.name else measure.overview or None
        found.append(
            {
                "name": column,
                "title": measure.label,
                "importance": analysis.group == "importance" and measure.orders,
                "lead": lead,
                "shades": shades(values) if lead is not None else None,
                "texts": [number_text(value) if own else "" for value, own in zip(values, known, strict=True)],
                "ends": [interval_text(low, high) for low, high in zip(*ends, strict=True)],
                "places": [int(place) if own else None for place, own in zip(places, known, strict=True)],
                "among": "in its layer" if measure.within_layer else f"of {known.sum()}",
            }
        )
    return found


def shades(values: pd.Series) -> str:
    """A digit for every head, from 0 at the smallest value to 8 at the largest; a hyphen where there is no number."""
    low, high = values.min(), values.max()
    steps = 8.999 * (values - low) / (high - low) if high > low else values * 0
    return "".join(str(int(step)) if np.isfinite(step) else "-" for step in steps)


def need_rows(study: Study, found: list[dict[str, Any]]) -> list[Rows]:
    """Of every head its importances, the one that answers which heads matter first: title, value, interval, place."""
    first = main_importance(study)
    order = [*([first.name] if first else []), *MEASURED]
    shown = [measure for measure in found if measure["importance"]]
    shown.sort(key=lambda measure: order.index(measure["name"]) if measure["name"] in order else len(order))
    rows: list[Rows] = [[] for _ in range(len(study.heads))]
    for measure in shown:
        adjusted = _adjusted(study, measure["name"])
        for own, p, value, ends, place in zip(
            rows, adjusted, measure["texts"], measure["ends"], measure["places"], strict=True
        ):
            if value:
                zero = "; not told from zero" if p > LEVEL else ""
                own.append([measure["title"], value, ends, f"{place} {measure['among']}{zero}"])
    return rows


def _adjusted(study: Study, measure: str) -> list[float]:
    """The adjusted p of every head, NaN where it was not tested."""
    if not study.has_table("importance"):
        return [np.nan] * len(study.heads)
    table = study.table("importance")
    own = table[table["measure"] == measure].drop_duplicates(list(HEAD_COLUMNS))
    return [*study.heads[list(HEAD_COLUMNS)].merge(own, on=list(HEAD_COLUMNS), how="left")["p_adjusted"].astype(float)]


def detail_tables(study: Study) -> Tables:
    """Of every head its rows in the tables of analyses, the leading ones, and the heads that are most like it."""
    tables: Tables = {}
    for name in (name for name in study.tables if name not in TOLD and {*HEAD_COLUMNS} <= {*study.tables[name]}):
        for row, own in rows_by_head(study, name):
            tables.setdefault(row, []).append(_detail(name, own.drop(columns=[*HEAD_COLUMNS, "index"])))
    for row, lines in similar(study).items():
        tables.setdefault(row, []).append(("Most similar heads of the layer", ["by", "heads"], lines))
    return tables


def _detail(name: str, table: pd.DataFrame) -> tuple[str, list[str], Rows]:
    """Title, names of columns and rows of texts; of one or two rows a line for each column."""
    lead = next((column for column in LEADING if column in table), None)
    table = table.nlargest(MOST_ROWS, lead) if lead else table.head(MOST_ROWS)
    columns: dict[str, list[str]] = {}
    for column in table:
        base, _, end = str(column).rpartition("_")
        whole = {base, f"{base}_low", f"{base}_high"} <= {*table}
        if end == "low" and whole:
            ends = zip(table[column], table[f"{base}_high"], strict=True)
            columns[f"{base} 95 %"] = [interval_text(low, high) for low, high in ends]
        elif end != "high" or not whole:
            columns[str(column)] = [cell_text(value) for value in table[column]]
    shown = {column.replace("_", " "): cells for column, cells in columns.items() if any(cells)}
    title = name.replace("_", " ").capitalize()
    if len(table) <= FEW_ROWS:
        return title, [""] * (len(table) + 1), [[column, *cells] for column, cells in shown.items()]
    return title, list(shown), [list(row) for row in zip(*shown.values(), strict=True)]


def similar(study: Study) -> dict[int, Rows]:
    """The most similar heads of the layer of every head, by every kind of similarity."""
    places = {key: row for row, key in enumerate(study.heads[list(HEAD_COLUMNS)].itertuples(index=False, name=None))}
    titles, lines = pair_measures(), dict[int, Rows]()
    for key, matrix in study.arrays.items():
        site, layer, kind = key.split("/")
        if kind.endswith(("_low", "_high")) or kind in DISTANCES:
            continue
        for head, values in enumerate(np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)):
            names = [
                f"{study.short_name(f'{site}.{layer}.{other}')} ({number_text(values[other])})"
                for other in np.argsort(-values, kind="stable")[:ALIKE]
                if np.isfinite(values[other])
            ]
            if names and (site, int(layer), head) in places:
                title = titles[kind].words if kind in titles else kind
                lines.setdefault(places[site, int(layer), head], []).append([title, "  ".join(names)])
    return lines


def cell_text(value: Any) -> str:
    """A cell of a table as text; empty where there is nothing."""
    if value is None or value != value:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, (int, float, np.number)) else str(value)


def facts(study: Study) -> Mapping[str, str]:
    """What a reader of the page may want to know of the run."""
    record = study.record
    checkpoint, data = record.get("checkpoint") or {}, record.get("data") or {}
    entries = {
        "checkpoint": checkpoint.get("path"),
        **{name: checkpoint.get(name) for name in ("format", "digest")},
        **{name: data.get(key) for name, key in DATA.items()},
        "command": " ".join(map(str, record.get("command") or ())),
        **{name: record.get(name) for name in ("seconds", "device", "dtype", "seed", "headscope")},
    }
    return {name: f"{value:g}" if isinstance(value, float) else str(value) for name, value in entries.items() if value}


DATA = {
    **{"source": "source", "prompts": "clean", "corrupt prompts": "corrupt", "answers": "answer", "target": "target"},
    **{"parses": "parse", "sentences": "sentences", "cut at the length limit": "truncated"},
}
