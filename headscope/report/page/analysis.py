"""A run of `headscope analyze` as data of the page: heads by column, and the detail of each."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.config.declarations import Declaration, measure_of, measured_columns, pair_measures
from headscope.files.tables import Bytes, Example
from headscope.report.layout.legend import functions_of
from headscope.report.page.numbers import rounded, rounded_all, scale
from headscope.results.study import Study, sides_of
from headscope.results.study_tables import HEAD_COLUMNS, MissingTable

REACH = 15  # offsets further than this are added up at both ends
RELATIONS = 12  # relations of a head that are shown, those with the largest margins
ALIKE = 5  # most similar heads
UNSUPPORTED = "functions_unsupported"  # labels that the estimates alone would give
DISTANCES = {"l2", "js"}
Rows = dict[int, list[Any]]


def analysis_data(run: Study, *, name: str = "") -> dict[str, Any]:
    """Everything of a run that the page shows, but importance, faithfulness, examples and findings."""
    heads = run.heads
    measured = set(heads["site"])
    layout = {site: counts for site, counts in run.layout.items() if site in measured}
    return {
        "name": name or run.name,
        "model": run.model,
        "data": run.data,
        "signature": run.signature,
        "complete": run.complete,
        "layout": layout,
        "facts": facts(run),
        "remarks": run.remarks,
        "left_out": [f"{entry.analysis}: {entry.why}" for entry in run.left_out],
        "site": [list(layout).index(site) for site in heads["site"]],
        "layer": heads["layer"].tolist(),
        "head": heads["head"].tolist(),
        "functions": [labels_of(cell) for cell in heads["functions"]],
        "unsupported": [labels_of(cell) for cell in heads.get(UNSUPPORTED, pd.Series([""] * len(heads)))],
        "evidence": evidence(run),
        "measures": measures(run),
        "texts": text_columns(heads),
        "offsets": offsets(run),
        "relations": relations(run),
        "similar": similar(run),
    }


def labels_of(cell: object) -> list[str]:
    """The labels in one cell of the column `functions`."""
    return [label.strip() for label in str(cell or "").split(";") if label.strip()]


def measures(run: Study) -> list[dict[str, Any]]:
    """Every column of numbers with its interval, its scale, and what its analysis says of it."""
    declared = measured_columns()
    described = []
    for column in run.measures:
        analysis = declared[column][0] if column in declared else Declaration("")
        measure, values = measure_of(column), run.heads[column].to_numpy(dtype=float)
        ends = {end: f"{column}_{end}" for end in ("low", "high")}
        bounds = {end: rounded_all(run.heads[name]) for end, name in ends.items() if name in run.heads}
        described.append(
            {
                "name": column,
                "title": measure.words,
                "unit": measure.unit,
                "analysis": analysis.name,
                "group": analysis.group,
                "summary": analysis.summary,
                "about": analysis.about,
                "keep": measure.keep,
                "orders": measure.orders,
                "why": measure.why,
                "overview": measure.overview,
                "scale": {key: rounded(v) if type(v) is float else v for key, v in scale(measure, values).items()},
                "values": rounded_all(values),
                "bounds": [bounds["low"], bounds["high"]] if len(bounds) == 2 else None,
            }
        )
    return described


def text_columns(heads: pd.DataFrame) -> list[dict[str, Any]]:
    """Columns of words beside the labels."""
    names = [str(name) for name in heads.columns if name not in (*HEAD_COLUMNS, "functions", UNSUPPORTED)]
    texts = [name for name in names if not pd.api.types.is_numeric_dtype(heads[name])]
    return [
        {"name": name, "title": name.replace("_", " "), "values": heads[name].fillna("").astype(str).tolist()}
        for name in texts
    ]


def functions_present(runs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The kinds of functions that heads of these runs have, as figures draw them."""
    families = {}
    for run in runs:
        for family in (functions_of(label)[0].family for label in _labels(run)):
            families[family.name] = {
                "name": family.name,
                "glyph": family.glyph,
                "letter": family.letter,
                "color": family.color,
                "meaning": family.meaning,
                "order": family.order,
                "detail": family.detail,
            }
    return sorted(families.values(), key=lambda family: (family["order"], family["name"]))


def _labels(run: Mapping[str, Any]) -> set[str]:
    """All labels of a run's heads, also those that lack evidence."""
    weak = (label.partition(" (")[0] for labels in run["unsupported"] for label in labels)
    return {*(label for labels in run["functions"] for label in labels), *weak}


def marks(runs: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
    """How each label is written short, by label: its family, and the letters beside the glyph."""
    labels = {label for run in runs for label in _labels(run)}
    named = {label: functions_of(label)[0] for label in sorted(labels)}
    return {label: {"family": function.family.name, "short": function.short} for label, function in named.items()}


def offsets(run: Study) -> Rows | None:
    """Of each head the shares of offsets with their intervals: [offset, share, low, high].

    The ends are added up, as shares of all queries, and have no interval.
    """
    table = _detail(run, "positional", "offset", "count", "share", "share_low", "share_high")
    if table is None:
        return None
    ends = ["share", "share_low", "share_high"]
    far = table["offset"].abs() >= REACH
    table.loc[far, "share"] = (table["count"] / table.groupby("index")["count"].transform("sum"))[far]
    table.loc[far, ends[1:]] = np.nan
    table["offset"] = table["offset"].clip(-REACH, REACH)
    sums = table.groupby(["index", "offset"])[ends].sum(min_count=1)
    rows: Rows = {}
    for (index, offset), share, low, high in zip(sums.index, *(sums[end] for end in ends), strict=True):
        rows.setdefault(int(index), []).append([int(offset), *rounded_all((share, low, high))])
    return rows


def evidence(run: Study) -> dict[str, Any] | None:
    """Of each head the lines of labels.csv: what its labels rest on, and what others lack."""
    table = _detail(run, "labels", "label")
    if table is None:
        return None
    columns = [str(name) for name in table.columns if name not in (*HEAD_COLUMNS, "index")]
    rows: Rows = {}
    for row in table.to_dict("records"):
        cells = ["" if row[name] is None or row[name] != row[name] else _plain(row[name]) for name in columns]
        rows.setdefault(int(row["index"]), []).append(cells)
    return {"columns": [name.replace("_", " ") for name in columns], "rows": rows}


RELATION_NUMBERS = ("accuracy", "accuracy_low", "accuracy_high", "baseline", "margin", "margin_low", "margin_high")


def relations(run: Study) -> dict[str, Any] | None:
    """Of each head the relations with the largest margins; `more` are columns of the table that others do not have."""
    table = _detail(run, "syntactic", "label", "count", "baseline_offset", *RELATION_NUMBERS)
    if table is None:
        return None
    known = {*HEAD_COLUMNS, "index", "label", "relation", "direction", "count", "baseline_offset", *RELATION_NUMBERS}
    more = [name for name in table.columns if name not in known and not str(name).startswith("baseline_")]
    labels = sorted(table["label"].astype(str).unique())
    places = {label: place for place, label in enumerate(labels)}
    rows: Rows = {}
    best = table.sort_values("margin", ascending=False, kind="stable").groupby("index").head(RELATIONS)
    for row in best.to_dict("records"):
        numbers = rounded_all(row[name] for name in ("count", "baseline_offset", *RELATION_NUMBERS))
        rows.setdefault(int(row["index"]), []).append(
            [places[str(row["label"])], *numbers, *(_plain(row[name]) for name in more)]
        )
    return {"labels": labels, "more": [str(name).replace("_", " ") for name in more], "rows": rows}


def similar(run: Study) -> dict[str, Any] | None:
    """Of each head the most similar ones of its layer, by every kind of similarity."""
    try:
        matrices = run.similarity
    except MissingTable:
        return None
    places = {key: index for index, key in enumerate(run.heads[list(HEAD_COLUMNS)].itertuples(index=False, name=None))}
    kinds: dict[str, Rows] = {}
    for key, matrix in matrices.items():
        site, layer, kind = key.split("/")
        if kind.endswith(("_low", "_high")) or kind in DISTANCES or len(matrix) < 2:
            continue
        for head, row in enumerate(matrix):
            others = [other for other in np.argsort(-row, kind="stable") if other != head and np.isfinite(row[other])]
            index = places.get((site, int(layer), head))
            if index is not None:
                nearest = [(places.get((site, int(layer), int(other))), row[other]) for other in others[:ALIKE]]
                kinds.setdefault(kind, {})[index] = [[place, rounded(v)] for place, v in nearest if place is not None]
    words = pair_measures()
    return (
        {
            "kinds": [{"name": kind, "title": words[kind].words if kind in words else kind} for kind in kinds],
            "rows": kinds,
        }
        if kinds
        else None
    )


def facts(run: Study) -> list[list[str]]:
    """What a reader of the page may want to know of the run, as pairs of words."""
    meta = run.record
    checkpoint, data = _section(meta, "checkpoint"), _section(meta, "data")
    command = meta.get("command")
    entries = {
        "checkpoint": checkpoint.get("path"),
        "format": checkpoint.get("format"),
        "digest": checkpoint.get("digest"),
        "source": data.get("source"),
        "prompts": data.get("clean"),
        "corrupt prompts": data.get("corrupt"),
        "answers": data.get("answer"),
        "target": data.get("target"),
        "parses": data.get("parse"),
        "sentences": data.get("sentences"),
        "cut at the length limit": data.get("truncated") or None,
        "command": " ".join(map(str, command)) if isinstance(command, list) else None,
        "seconds": meta.get("seconds"),
        "device": meta.get("device"),
        "dtype": meta.get("dtype"),
        "seed": meta.get("seed"),
        "headscope": meta.get("headscope"),
    }
    return [[name, str(value)] for name, value in entries.items() if value not in (None, "")]


def _section(meta: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = meta.get(name)
    return section if isinstance(section, dict) else {}


def _detail(run: Study, name: str, *columns: str) -> pd.DataFrame | None:
    """The table of an analysis with the row of every head in `heads` as `index`; None where it was not part of it."""
    try:
        table = run.table(name, *columns)
    except MissingTable:
        return None
    places = run.heads[list(HEAD_COLUMNS)].assign(index=range(len(run.heads)))
    return table.merge(places, on=list(HEAD_COLUMNS), how="inner")


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    return rounded(value) if isinstance(value, (int, float, np.number)) else str(value)


LEVELS = (63, 15, 7)
"""Steps from 0 to 1, finest first: weights are (step / levels)², so that small ones are told apart."""
ROOM = 6_000_000
"""Letters of the page that all weights may take."""
FAINT = 0.01  # weights below are 0


def examples_data(examples: Sequence[Example]) -> dict[str, Any] | None:
    """The sentences with their weights in the finest levels for which there is room; `left_out` had none in any."""
    if not examples:
        return None
    for levels in LEVELS:
        packed = [_packed(example, levels) for example in examples]
        if sum(map(_size, packed)) <= ROOM:
            return {"levels": levels, "sentences": packed, "left_out": 0}
    fitting = int((np.cumsum([_size(sentence) for sentence in packed]) <= ROOM).sum())
    return {"levels": levels, "sentences": packed[:fitting], "left_out": len(packed) - fitting}


def _packed(example: Example, levels: int) -> dict[str, Any]:
    sides = {side: list(subwords) for side, subwords in example.subwords.items()}
    sites = {
        site: {"sides": list(sides_of(site, sides)), "heads": len(weights), "packed": pack(weights, levels)}
        for site, weights in example.weights.items()
    }
    return {"line": example.number + 1, "texts": dict(example.texts), "subwords": sides, "sites": sites}


def pack(weights: Bytes, levels: int) -> str:
    """Weights [n t s] as bytes 0 … 255 in `levels` steps, deflated, in base64."""
    steps = _STEPS[levels][weights].tobytes()
    deflated = min((_deflated(steps, strategy) for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)), key=len)
    return base64.b64encode(deflated).decode("ascii")


def _deflated(content: bytes, strategy: int) -> bytes:
    """Without a search for repetitions, of which attention has none: a hundred times as fast, and smaller."""
    stream = zlib.compressobj(strategy=strategy)
    return stream.compress(content) + stream.flush()


def _steps(levels: int) -> Bytes:
    """The step of every byte."""
    weights = np.arange(256) / 255
    return np.where(weights < FAINT, 0, np.maximum(np.round(levels * np.sqrt(weights)), 1)).astype(np.uint8)


_STEPS = {levels: _steps(levels) for levels in LEVELS}


def _size(sentence: dict[str, Any]) -> int:
    return sum(len(site["packed"]) for site in sentence["sites"].values())
