"""The files of finished cells and of scores, with digests: what was damaged since is known, and done again."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import DataError, HeadscopeError
from headscope.evaluation.metrics.base import METRICS
from headscope.files.reading import read_object, read_record
from headscope.files.writing import write_atomically, write_json
from headscope.heads import HeadId, Layout, all_heads
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.scores_file import read_scores
from headscope.pruning.sweep.config import Cell

CELLS, SCORES = "cells", "scores"
Record = dict[str, Any]
NUMBER = (int, float)
TYPES: Mapping[str, Any] = {
    "cell": dict,
    "kept": list,
    "metric": str,
    "sums": list,
    "loss": list,
    "facts": dict,
    "seconds": NUMBER,
}
OF_CELL = {"method": (str,), "keep": (int, type(None)), "strength": (*NUMBER, type(None)), "seed": (int, type(None))}
"""Types of a record's values, and of those of its cell."""


def cell_path(folder: Path, name: str) -> Path:
    """The file of a cell."""
    return folder / CELLS / f"{name}.json"


def cell_names(folder: Path) -> list[str]:
    """Names of the cells that are finished."""
    return sorted(path.stem for path in (folder / CELLS).glob("*.json") if not path.name.startswith("."))


def write_cell(folder: Path, cell: Cell, record: Record) -> None:
    """Keep the record of a finished cell."""
    text = json.dumps({**record, "sha256": _digest(record)}) + "\n"
    write_atomically(cell_path(folder, cell.name), lambda place: place.write_text(text, encoding="utf-8"))


def _digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def read_cell(folder: Path, name: str) -> Record:
    """The record of a finished cell; DataError for a file that is none, or that was changed since it was written."""
    path = cell_path(folder, name)
    record = read_object(path)
    digest = record.pop("sha256", None)  # cells of earlier versions have none
    if digest is not None and digest != _digest(record):
        raise DataError(f"{path} was changed after it was written")
    try:
        _check(record, name)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, HeadscopeError) as error:
        detail = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise DataError(f"{path} is no finished cell ({detail})") from None
    return record


def _check(record: Record, name: str) -> None:
    """ValueError and the like for a record that no table can be made of."""
    for key, kind in TYPES.items():
        if not isinstance(record[key], kind) or isinstance(record[key], bool):
            raise ValueError(f"{key} is {repr(record[key])[:40]}")
    entries = record["cell"]
    if any(
        not isinstance(entries.get(key), kind) or isinstance(entries.get(key), bool) for key, kind in OF_CELL.items()
    ):
        raise ValueError(f"cell is {entries}")
    if Cell(**entries).name != name or type(entries.get("control", False)) is not bool:
        raise ValueError(f"it is that of {Cell(**entries).name}")
    if len({HeadId.parse(head) for head in record["kept"]}) < len(record["kept"]):
        raise ValueError("a head twice")
    labels = record.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(text, str) for text in labels.values()):
        raise ValueError("labels")
    if not isinstance(record["facts"].get("lambda_paper", 0), NUMBER) or not isinstance(record.get("model", ""), str):
        raise ValueError("facts or model")
    sums, loss = np.array(record["sums"]), np.array(record["loss"])
    numbers = all(values.dtype.kind in "if" and not np.isnan(values).any() for values in (sums, loss))
    if not numbers or sums.ndim != 2 or loss.shape != (2,) or not loss[1] > 0:
        raise ValueError("sums or loss")
    METRICS.get(record["metric"]).of(sums.sum(axis=0, keepdims=True))
    if not 0 <= record["seconds"] < float("inf"):
        raise ValueError("seconds")


@dataclass(frozen=True)
class FinishedCells:
    """The records of finished cells by name, and why each of the other files is none."""

    records: Mapping[str, Record]
    damaged: Mapping[str, str]


def finished_cells(folder: Path, gating: GateLayout, metric: str) -> FinishedCells:
    """What a directory holds of a sweep over these heads by this metric."""
    records, damaged = {}, {}
    for name in cell_names(folder):
        try:
            records[name] = read_cell(folder, name)
        except DataError as error:
            damaged[name] = str(error)
    heads = set(map(str, gating.without([])))
    shapes = Counter(np.shape(record["sums"]) for record in records.values())
    for name, record in records.items():
        strange = record["metric"] != metric or not set(record["kept"]) <= heads
        if strange or np.shape(record["sums"]) != shapes.most_common(1)[0][0]:
            damaged[name] = f"{cell_path(folder, name)} is of other heads, another metric or another text"
    return FinishedCells({name: record for name, record in records.items() if name not in damaged}, damaged)


# Scores of heads.


def scores_digest_path(path: Path) -> Path:
    """Where the digest of a file of scores is kept."""
    return path.with_suffix(".json")


def write_scores(path: Path, scores: Scores, layout: Layout) -> None:
    """Keep scores of all heads, and the digest of their file."""
    rows = [(head.site.value, head.layer, head.head, scores.get(head)) for head in all_heads(layout)]
    table = pd.DataFrame(rows, columns=["site", "layer", "head", "score"])
    write_atomically(path, lambda place: table.to_csv(place, index=False))
    write_json(scores_digest_path(path), {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()})


class Journal(dict[str, float]):
    """Numbers by name that are kept in a file as they come, so that a run that was interrupted finds them.

    A line that was cut short counts for nothing.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        *lines, _ = path.read_text(encoding="utf-8").split("\n") if path.is_file() else [""]
        for line in lines:
            name, _, number = line.partition("\t")
            with suppress(ValueError):
                super().__setitem__(name, float(number))

    def __setitem__(self, name: str, number: float) -> None:
        """Also writes it."""
        super().__setitem__(name, number)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{name}\t{number!r}\n")


def kept_scores(path: Path, layout: Layout) -> Scores | None:
    """Scores as they were written; None where there are none, and for a file that was changed since."""
    try:
        digest = read_record(scores_digest_path(path)).get("sha256")  # sweeps of earlier versions have none
        if digest is not None and digest != hashlib.sha256(path.read_bytes()).hexdigest():
            return None
        scores = read_scores(path, layout, column="score")[1]
    except (DataError, OSError):
        return None
    return scores if set(scores) == set(all_heads(layout)) else None
