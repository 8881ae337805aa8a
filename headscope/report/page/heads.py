"""The data about heads that the page's script shows: cards, tables, example sentences, the order by each measure.

Numbers become texts here, by the same functions as in answers.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.config.declarations import measure_of, measured_columns
from headscope.data.offsets import Marks, display_subword
from headscope.description.examples import WINDOW
from headscope.files.tables import Example
from headscope.heads import HeadId
from headscope.report.figures.layers import PARTS
from headscope.report.marks import functions_of
from headscope.results.answer import interval_text, number_text
from headscope.results.roles import role_of
from headscope.results.study import Study, sides_of
from headscope.results.study_answers import EXACT, IMPORTANCES, LEVEL, damage_words, joint_effects, main_importance
from headscope.results.study_tables import HEAD_COLUMNS

MAX_ROWS, FEW_ROWS = 8, 2  # rows of a table on a card; a table with few rows is transposed
SHOWN_OTHERWISE = {"heads", "examples", "token_pairs", "importance"}  # tables that other parts of a card show
LEADING = ("margin", "share", "score", "weight", "value")
"""Columns that sort the rows of a table; the first one that the table has does."""
NEAR = 3  # words that an example shows on either side of the query and of the key
VISIBLE = 0.005  # smaller shares have no part in a bar
KINDS = {"lexical": "the word types scored highest", "surprising": "looked at far more than position expects"}
LEVELS = 63  # steps from 0 to 1: weights are (step / levels)², so that small ones are told apart
MAX_LETTERS = 6_000_000  # that attention weights may take on the page
FAINT = 0.01  # smaller weights become 0
SHARES = np.arange(256) / 255
STEPS = np.where(SHARES < FAINT, 0, np.maximum(np.round(LEVELS * np.sqrt(SHARES)), 1)).astype(np.uint8)
"""The step for each byte of a stored weight."""


def run_data(study: Study, name: str) -> dict[str, Any]:
    """The data of a study for the script."""
    columns = measures(study)
    counts: dict[str, int] = {}
    heads = []
    tables = detail_tables(study)
    examples, pairs = cells_by_head(study, "examples", _example), cells_by_head(study, "token_pairs", _pair)
    joint, damage = joint_effects(study), damage_words(study)
    supported, unsupported = study.labels, study.unsupported
    for row, columns_of_head in enumerate(study.heads.to_dict("records")):
        head = HeadId.of_row(columns_of_head)
        labels = supported.get(head, [])
        roles = [role for role in dict.fromkeys(map(role_of, labels)) if role in joint]
        heads.append(
            {
                "name": str(head),
                "short": head.name(study.layout),
                "place": [head.site.value, head.layer, head.head],
                "at": counts.setdefault(head.site.value, 0),
                "labels": labels,
                "weak": unsupported.get(head, []),
                "joint": [
                    f"{damage} if all heads of “{role}” are off: {', '.join(filter(None, joint[role]))}"
                    for role in roles
                ],
                "tables": tables.get(row, []),
                "sentence": cell_text(columns_of_head.get("description")),
                "bar": explained_parts(columns_of_head),
                "examples": examples.get(row, []),
                "pairs": pairs.get(row, []),
            }
        )
        counts[head.site.value] += 1
    first_heads = [name for answer in study.answers() for name in answer.heads]
    return {
        "name": name,
        "model": study.model,
        "sites": list(counts),
        "heads": heads,
        "start": next((row for row, entry in enumerate(heads) if entry["name"] in first_heads[:1]), 0),
        "measures": columns,
        "examples": examples_data(study.examples),
    }


def marks(labels: set[str]) -> tuple[dict[str, list[Any]], dict[str, tuple[str, str]]]:
    """By label its glyph, letters, style class and role; by family of labels its style class and colour."""
    texts: dict[str, list[Any]] = {}
    colors: dict[str, tuple[str, str]] = {}
    for label in sorted(labels):
        bare = label.partition(" (")[0]
        function = functions_of(bare)[0]
        name, _ = colors.setdefault(function.family.name, (f"f{len(colors)}", function.family.color))
        texts[label] = [function.family.glyph, function.letters, name, role_of(bare)]
    return texts, colors


def measures(study: Study) -> list[dict[str, Any]]:
    """Every measure as texts with intervals. `places` (numbers) and `ranks` (texts) count from the head ranked first.

    Measures within a layer are ranked within it. `lead` orders the measures with a map, which have `shades`;
    `importance` orders those that say which heads matter.
    """
    columns, first = measured_columns(), main_importance(study)
    order, entries = list(dict.fromkeys([*([first.name] if first else []), *IMPORTANCES])), []
    layers = [study.heads[name] for name in ("site", "layer")]
    tests: dict[Any, float] = {}
    damage = damage_words(study) if "objective" in study.record else ""
    if study.has_table("importance"):
        table = study.table("importance")
        keys = table[["measure", *HEAD_COLUMNS]].itertuples(index=False, name=None)
        tests = dict(zip(keys, table["p_adjusted"], strict=True))
    for column in study.measures:
        group = columns[column][0].group if column in columns else ""
        measure, values = measure_of(column), study.heads[column].astype(float)
        groups = values.groupby(layers) if measure.within_layer else values
        ranks = groups.rank(method="min", ascending=measure.keep == "lowest")
        ends = [study.heads.get(f"{column}_{end}", values) for end in ("low", "high")]
        finite = np.isfinite(values)
        among = "in its layer" if measure.within_layer else f"of {finite.sum()}"
        heads = study.heads[HEAD_COLUMNS].itertuples(index=False, name=None)
        zero_notes = ["; not told from zero" * (tests.get((column, *head), 0) > LEVEL) for head in heads]
        lead = 0 if first and column == first.name else measure.overview or None
        steps = (values - values.min()) / (np.ptp(values[finite]) or 1) if finite.any() else values
        shades = "".join("-" if step != step else str(int(8.999 * step)) for step in steps)  # 0 at the smallest, to 8
        importance = len(order) if group == "importance" and measure.orders else None
        if importance is not None and column in order:
            importance = order.index(column)
        entries.append(
            {
                "name": column,
                "title": f"{measure.words}: {damage}" if measure.name in EXACT and damage else measure.label,
                "importance": importance,
                "lead": lead,
                "shades": shades if lead is not None else None,
                "texts": [
                    number_text(value) if is_finite else "" for value, is_finite in zip(values, finite, strict=True)
                ],
                "ends": [interval_text(low, high) for low, high in zip(*ends, strict=True)],
                "places": [int(rank) if is_finite else None for rank, is_finite in zip(ranks, finite, strict=True)],
                "ranks": [
                    f"{rank:.0f} {among}{note}" if is_finite else ""
                    for rank, note, is_finite in zip(ranks, zero_notes, finite, strict=True)
                ],
            }
        )
    return entries


def rows_by_head(study: Study, name: str) -> Iterator[tuple[int, pd.DataFrame]]:
    """The rows of each head in a table, with the head's number in `heads`; nothing if the study lacks the table."""
    if study.has_table(name):
        head_rows = study.heads[HEAD_COLUMNS].assign(index=range(len(study.heads)))
        for index, rows in study.table(name).merge(head_rows, on=HEAD_COLUMNS, how="inner").groupby("index"):
            yield int(str(index)), rows.drop(columns=["index"])


def detail_tables(study: Study) -> dict[int, list[Any]]:
    """By head its leading rows in the tables of analyses: title, names of columns, rows of texts."""
    tables: dict[int, list[Any]] = {}
    shown = [name for name in study.tables if name not in SHOWN_OTHERWISE]
    for name in (name for name in shown if {*HEAD_COLUMNS} <= {*study.tables[name]}):
        for row, rows_of_head in rows_by_head(study, name):
            columns, title = _columns(rows_of_head.drop(columns=HEAD_COLUMNS)), name.replace("_", " ").capitalize()
            rows = [list(row) for row in zip(*columns.values(), strict=True)]
            if len(rows) <= FEW_ROWS:  # a line for each column
                lines = [[column, *cells] for column, cells in columns.items()]
                tables.setdefault(row, []).append((title, [""] * (len(rows) + 1), lines))
            else:
                tables.setdefault(row, []).append((title, list(columns), rows))
    return tables


def _columns(table: pd.DataFrame) -> dict[str, list[str]]:
    """The leading rows as columns of texts; an interval is one column, and empty columns are left out."""
    lead = next((column for column in LEADING if column in table), None)
    table = table.nlargest(MAX_ROWS, lead) if lead else table.head(MAX_ROWS)
    columns: dict[str, list[str]] = {}
    for column in table:
        base, _, end = str(column).rpartition("_")
        has_interval = {base, f"{base}_low", f"{base}_high"} <= {*table}
        if end == "low" and has_interval:
            columns[f"{base} 95 %"] = list(map(interval_text, table[column], table[f"{base}_high"]))
        elif end != "high" or not has_interval:
            columns[str(column)] = list(map(cell_text, table[column]))
    return {column.replace("_", " "): cells for column, cells in columns.items() if any(cells)}


def cell_text(value: Any) -> str:
    """A cell of a table as text; empty for None and NaN."""
    if value is None or value != value:
        return ""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    return number_text(value) if isinstance(value, (int, float, np.number)) else str(value)


def explained_parts(head: Mapping[Any, Any]) -> list[list[str]]:
    """The bar of what explains a head: parts with a title, a style class, a share, and left end and width in percent.

    The unexplained share has no part.
    """
    start, parts = 0.0, []
    if not math.isfinite(head.get("explained", math.nan)):
        return []
    for number, (group, (title, _)) in enumerate(PARTS.items()):
        share = min(max(np.nan_to_num(head.get(f"explained_{group}", 0.0)), 0), 1 - start)
        if share >= VISIBLE:
            parts.append([title, f"g{number}", number_text(share, 2), f"{100 * start:.1f}", f"{100 * share:.1f}"])
        start += share
    return parts


def cells_by_head(study: Study, name: str, cell: Any) -> dict[int, list[Any]]:
    """By head the results of `cell` for each of its rows in a table and the vocabulary's marks."""
    return {
        head: [cell(row, study.marks) for row in rows.to_dict("records")] for head, rows in rows_by_head(study, name)
    }


def _pair(row: Mapping[Any, Any], marks: Marks) -> list[Any]:
    ends = " → ".join(display_subword(str(row[end]), marks) for end in ("query", "key"))
    numbers = (f"{name} {number_text(row[name])}" for name in ("score", "weight", "count"))
    return [KINDS.get(row["kind"], row["kind"]), ends, ", ".join(numbers)]


def _example(row: Mapping[Any, Any], marks: Marks) -> dict[str, Any]:
    """An example: the words around a query and its key, each with "query", "key", both or neither.

    Cross attention has two parts with an arrow between. Positions are token numbers from 0; left-out words are "…".
    """
    ends = {end: int(row[f"{end}_position"]) for end in ("query", "key")}
    words = {end: {**window(str(row[f"{end}_text"]), at), at: str(row[end])} for end, at in ends.items()}
    is_self = str(row["site"]).endswith("self")
    parts: list[tuple[str, str]] = []
    for sides in (tuple(ends),) if is_self else (("query",), ("key",)):
        parts += [("→", "")] if parts else []
        tokens = {position: word for end in sides for position, word in words[end].items()}
        near = [position for position in sorted(tokens) if any(abs(position - ends[end]) <= NEAR for end in sides)]
        for before, position in zip([near[0] - 1, *near], near, strict=False):
            parts += [("…", "")] if position - before > 1 else []
            marked_ends = " ".join(end for end in sides if ends[end] == position)
            parts.append((display_subword(tokens[position], marks), marked_ends))
    return {"line": int(row["sentence"]) + 1, "weight": number_text(row["weight"], 2), "words": parts}


def window(text: str, at: int) -> dict[int, str]:
    """The words of a text in examples.csv by position; the one in brackets is at position `at`."""
    start = max(0, at - WINDOW // 2)
    words = text.removeprefix("… " if start else "").removesuffix(" …").split(" ")
    middle = words[at - start] if at - start < len(words) else ""
    is_aligned = len(middle) > 2 and middle[0] == "[" and middle[-1] == "]" and len(words) <= WINDOW
    return {start + position: word for position, word in enumerate(words)} if is_aligned else {}


def examples_data(examples: Sequence[Example]) -> dict[str, Any] | None:
    """As many sentences as fit, with their weights [n t s] quantised to steps, deflated, in base64.

    `percents` are the texts of the steps.
    """
    if not examples:
        return None
    sentences: list[dict[str, Any]] = []
    for example in examples:
        sides = {side: list(subwords) for side, subwords in example.subwords.items()}
        sites = {}
        for site, weights in example.weights.items():
            # attention has no repetitions; not to search for them is a hundred times as fast, and smaller
            stream = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
            text = base64.b64encode(stream.compress(STEPS[weights].tobytes()) + stream.flush()).decode("ascii")
            sites[site] = {"sides": list(sides_of(site, sides)), "packed": text}
        texts = dict(example.texts)
        sentences.append({"line": example.number + 1, "texts": texts, "subwords": sides, "sites": sites})
    sizes = [sum(len(site["packed"]) for site in sentence["sites"].values()) for sentence in sentences]
    fitting = int((np.cumsum(sizes) <= MAX_LETTERS).sum())
    percents = [f"{(step / LEVELS) ** 2:.0%}".replace("%", " %") for step in range(LEVELS + 1)]
    return {"percents": percents, "sentences": sentences[:fitting], "left_out": len(sentences) - fitting}
