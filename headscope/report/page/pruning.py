"""What `headscope prune` and `headscope train` wrote as data of the page.

Curves of quality, survivors, gates, and the smaller models; of trainings a panel of curves for every quantity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.bounds import MOST_LAYERS
from headscope.errors import HeadscopeError
from headscope.evaluation.before_after import verdict_words
from headscope.files.reading import read_object
from headscope.report.figures.training import STEPS, TrainingHistory, load_history, quantities
from headscope.report.page.numbers import LOSS, rounded, rounded_all
from headscope.report.readers.pruning_runs import PruningRun, load_pruned
from headscope.results.study_tables import RunError
from headscope.signature import counted

NUMBERS = ("seed", "kept", "of", "value", "low", "high", "difference", "loss")
TRAJECTORIES = 4  # cells whose gates are drawn while they learn
UPDATES = 40  # points of a trajectory
RECORD = "pruning.json"


SIZES = {
    "attention_heads": "attention heads",
    "flops": "floating point operations of the text",
    "attention_flops": "floating point operations of attention",
    "output_flops": "floating point operations of the output layer",
    "read": "bytes of weights that a step reads",
    "cache": "cache, bytes a token",
    "cross_cache": "cache, bytes a source token",
}
CHECKED = {
    "data": "text",
    "sentences": "sentences",
    "difference": "largest difference of logits, as a share of the largest",
    "tolerance": "the largest that is allowed",
    "own": "the same with the model's own attention code",
    "cached": "the same through the key/value cache",
    "reloaded": "the same of the files, opened again",
    "searched": "searches that end alike",
    "searches": "searches",
}
"""What the numbers of a removal's record are called; others are shown by their names, without underscores."""
COLUMNS = {"cell": "run", "of": "of all", "low": "95 % from", "high": "to", "loss": LOSS}


def is_removal(path: Path) -> bool:
    """Whether a directory is what `headscope prune remove` wrote."""
    try:
        return read_object(path / RECORD, error=RunError).get("kind") in ("removal", "shrink")
    except HeadscopeError:
        return False


def pruning_data(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Sweeps one by one, runs that chose heads together."""
    return [_run_data(run) for run in load_pruned(paths)] if paths else []


def removal_data(path: Path) -> dict[str, Any]:
    """What `headscope prune remove` made: sizes and times before and after, and how the result was checked."""
    record = read_object(path / RECORD, error=RunError)
    try:
        before, after = dict(record["before"]), dict(record["after"])
        sizes = [[titled(name, SIZES), rounded(before[name]), rounded(after[name])] for name in before if name in after]
        quality = _quality(record.get("quality"))
        quality["quality"] += _quality(record.get("elsewhere"))["quality"]
        times = [
            [
                str(time["what"]),
                rounded(time["sentences"]),
                *(rounded(time[key]) for key in ("before", "after", "speedup")),
                f"{time['least']:.2f}–{time['most']:.2f}" if "least" in time else "",
            ]
            for time in record.get("times") or []
        ]
        checked = dict(record.get("verified") or {})
        if not checked.get("searches"):  # no model that searches
            checked |= {"searched": None, "searches": None}
        verified = [[titled(name, CHECKED), _plain(value)] for name, value in checked.items()]
        removed = [str(name) for name in record["removed"]]
        source = dict(record.get("source") or {}).get("path")
    except (AttributeError, KeyError, TypeError, ValueError) as broken:
        raise RunError(f"{path / RECORD} is no record of a removal ({type(broken).__name__}: {broken})") from None
    return {
        "name": path.resolve().name,
        "source": str(source or ""),
        "removed": removed,
        **quality,
        "compared": _compared(dict(record.get("compensation") or {})),
        "sizes": [row for row in sizes if row[1]],
        "times": times,
        "verified": [row for row in verified if row[1] is not None],
        "remarks": record.get("remarks", []),
    }


def _quality(record: Any) -> dict[str, Any]:
    """Rows of quality before and after, and the verdict in words; none where it was not measured."""
    if not record:
        return {"quality": [], "verdict": ""}
    text = f"{record['title']} ({counted(record['sentences'], 'sentence')}, {Path(str(record['text'])).name})"
    rows = [[text, rounded(record["before"]["value"]), rounded(record["after"]["value"])]]
    if record.get("loss"):
        rows.append([LOSS, *rounded_all(record["loss"])])
    return {"quality": rows, "verdict": verdict_words(record)}


def _compared(compensation: Mapping[str, Any]) -> dict[str, Any]:
    """Columns and rows of compensations: the objective on held-out and on other text, and by how much it is worse.

    The harm, by which `auto` chooses, is a share of what masking loses: there is no such column where masking gains.
    """
    record = compensation.get("choice")
    if not record:
        return {"columns": [], "rows": [], "text": ""}
    masked = record["candidates"][0]
    columns, kept = [""], []
    objective = compensation["performance"]["intact"]["objective"]
    for text, title in (("held_out", f"{objective}, held out"), ("check", f"{record['objective']}, other text")):
        columns += [title, "worse by"]
        kept += [(text, "value"), (text, "damage")]
        if masked[text]["damage"] > 0:
            columns.append("as a share")
            kept.append((text, "harm"))
    rows = [
        [
            each["name"] + " (taken)" * (each["name"] == record["taken"]),
            *(rounded(each[text][key]) for text, key in kept),
        ]
        for each in record["candidates"]
    ]
    other = f"{Path(str(record['text'])).name}, {counted(record['sentences'], 'sentence')}"
    text = f"on held-out text and on other text ({other})"
    text += "; as a share of what masking loses" * ("as a share" in columns)
    return {"columns": columns, "rows": rows, "text": text}


def titled(name: Any, titles: Mapping[str, str]) -> str:
    """What a field of a record is called on the page: `kept_encoder-self` is "kept in encoder-self"."""
    words = str(name)
    if words.startswith("kept_"):
        return f"kept in {words.removeprefix('kept_')}"
    return titles.get(words, words.replace("_", " "))


def _plain(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return rounded(value) if isinstance(value, (int, float)) else str(value) if isinstance(value, str) else None


def _run_data(run: PruningRun) -> dict[str, Any]:
    numbers = [name for name in NUMBERS if name in run.cells]
    sites = [f"kept_{site}" for site in run.sites]
    columns = ["cell", "method", "control", "size", *(["metric"] if run.measured else []), *numbers, *sites]
    text = {"cell", "method", "control", "size", "metric"}
    cells = {
        name: run.cells[name].fillna("").astype(str).tolist() if name in text else rounded_all(run.cells[name])
        for name in columns
    }
    return {
        "name": run.name,
        "model": run.model,
        "measured": run.measured,
        "signature": str(run.meta.get("signature", "")),
        "notes": run.notes,
        "remarks": run.meta.get("remarks", []),
        "sites": run.sites,
        "columns": columns,
        "titles": [titled(column, COLUMNS) for column in columns],
        "cells": cells,
        "survivors": _survivors(run.survivors),
        "more_gates": max(0, len(run.gates) - TRAJECTORIES),
        "gates": {cell: _trajectory(run.trajectory(cell)) for cell in list(run.gates)[:TRAJECTORIES]},
    }


def _survivors(table: pd.DataFrame) -> dict[str, dict[str, list[list[int]]]]:
    """Of every cell the heads that stay, by site and layer."""
    found: dict[str, dict[str, list[list[int]]]] = {}
    heads = table[["cell", "site", "layer", "head"]].drop_duplicates().sort_values(["layer", "head"])
    if len(heads) and not (heads["layer"].min() >= 0 and heads["layer"].max() < MOST_LAYERS):
        raise RunError("survivors.csv holds a layer that no model has; run the sweep again")
    for cell, site, layer, head in heads.itertuples(index=False, name=None):
        layers = found.setdefault(str(cell), {}).setdefault(str(site), [])
        layers += [[] for _ in range(int(layer) + 1 - len(layers))]
        layers[int(layer)].append(int(head))
    return found


def _trajectory(table: pd.DataFrame) -> dict[str, Any]:
    """The gates of a cell at some of its updates."""
    wide = table.pivot(index="update", columns=["site", "layer", "head"], values="gate")
    rows = np.unique(np.linspace(0, len(wide) - 1, min(len(wide), UPDATES)).round().astype(int))
    chosen = wide.iloc[rows]
    return {
        "updates": [int(update) for update in chosen.index],
        "heads": [".".join(map(str, head)) for head in wide.columns.to_flat_index()],
        "gates": [rounded_all(chosen[column]) for column in wide.columns],
    }


POINTS = 300  # of a curve


def training_data(paths: Sequence[Path]) -> dict[str, Any] | None:
    """All runs together: names, variants, signatures, and panels of curves over updates."""
    if not paths:
        return None
    histories = [load_history(path) for path in paths]
    names = distinct([history.name for history in histories])
    panels = []
    for quantity in quantities(histories):
        curves = [
            curve for number, history in enumerate(histories) for curve in _curves(history, number, quantity.column)
        ]
        if curves:
            steps = quantity.column in STEPS
            panels.append({"title": quantity.title, "unit": quantity.unit, "steps": steps, "curves": curves})
    return {
        "runs": [
            {
                "name": name,
                "variant": str(history.meta.get("variant", "")),
                "signature": str(history.meta.get("signature", "")),
                "updates": rounded(history.metrics["update"].max()),
                "seconds": rounded(history.metrics["seconds"].max()),
                "best": best_of(history),
            }
            for name, history in zip(names, histories, strict=True)
        ],
        "panels": panels,
    }


def best_of(history: TrainingHistory) -> list[list[Any]]:
    """The best of what was measured on the validation text, and the update at which that was."""
    best = []
    for column, title, highest in (("valid_nll", "validation loss", False), ("bleu", "BLEU", True)):
        if history.has(column):
            x, y = history.line(column, "update")
            place = int(np.argmax(y) if highest else np.argmin(y))
            best.append([title, rounded(y[place]), rounded(x[place])])
    return best


def distinct(names: Sequence[str]) -> list[str]:
    """Names, numbered where several are the same."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: place + 1].count(name)})"
        for place, name in enumerate(names)
    ]


def _curves(history: TrainingHistory, number: int, quantity: str) -> list[dict[str, Any]]:
    curves = []
    for site in history.sites(quantity):
        column = f"{quantity}.{site}" if site else quantity
        x, y = history.line(column, "update")
        rows = np.unique(np.linspace(0, len(x) - 1, min(len(x), POINTS)).round().astype(int))
        curves.append(
            {"run": number, "column": column, "site": site, "x": rounded_all(x[rows]), "y": rounded_all(y[rows])}
        )
    return curves
