"""The files of a sweep: those of finished cells and of scores have digests, so what was damaged since is done again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import DataError
from headscope.files.folders import replacing_folder
from headscope.files.output_checks import OutputKind, contents
from headscope.files.reading import file_digest, read_object, read_objects, read_record
from headscope.files.replace import discard
from headscope.files.tables import write_csv
from headscope.files.writing import write_atomically, write_json
from headscope.formats.native import DIRECTORY
from headscope.heads import Layout, all_heads
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.scores_file import read_scores
from headscope.pruning.selection import CHOICE, STATE
from headscope.pruning.sweep.config import Cell
from headscope.training.files.outputs import TRAINING
from headscope.training.from_scratch import FRESH, RUN

CELLS, SCORES, RUNS = "cells", "scores", "runs"
RECORD, TABLE, SURVIVORS = "sweep.json", "sweep.csv", "survivors.csv"
OF_CELL = OutputKind(
    "cell", "run of a cell", "", (CHOICE.record, *CHOICE.writes, *DIRECTORY.in_folder(FRESH), *TRAINING.in_folder(RUN))
)
SWEEP = OutputKind(
    "sweep",
    "run of `headscope prune sweep`",
    RECORD,
    (*(TABLE, SURVIVORS, f"{CELLS}/*.json", f"{SCORES}/*.csv", f"{SCORES}/*.json"), *OF_CELL.in_folder(f"{RUNS}/*")),
    extensible=True,
)
Record = dict[str, Any]


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
    """The record of a finished cell; DataError for a file that was changed since it was written."""
    path = cell_path(folder, name)
    return checked(read_object(path), path)


def checked(record: Record, path: Path) -> Record:
    """The record of a finished cell without its digest; DataError where that is of something else."""
    if record.pop("sha256", None) != _digest(record):
        raise DataError(f"{path} is no finished cell, or was changed after it was written")
    return record


@dataclass(frozen=True)
class FinishedCells:
    """The records of finished cells by name, and why each of the other files is none."""

    records: Mapping[str, Record]
    damaged: Mapping[str, str]


def finished_cells(found: Mapping[str, Record | DataError], folder: Path) -> FinishedCells:
    """What is `found` in the files of cells in a directory."""
    records, damaged = {}, {}
    for name, content in found.items():
        try:
            if isinstance(content, DataError):
                raise content
            records[name] = checked(dict(content), cell_path(folder, name))
        except DataError as error:
            damaged[name] = str(error)
    return FinishedCells(records, damaged)


class Begun(NamedTuple):
    """A directory that a sweep was begun in: its record, and what its files of cells hold."""

    folder: Path
    record: Mapping[str, Any]
    cells: Mapping[str, Record | DataError]


def sweeps_begun(config: SweepConfig) -> list[Begun]:
    """The directories of sweeps that may be gone on with: `config.out`, unless it is replaced, and OUT.new."""
    new = replacing_folder(config.out)
    holding = [(folder, contents(folder, SWEEP)) for folder in ([new] if config.force else [config.out, new])]
    return [
        Begun(folder, held.record, read_objects(folder / CELLS))
        for folder, held in holding
        if held.kind == SWEEP.name or (folder == config.out and RECORD in held.files)  # damaged: it is said
    ]


def clear_cells(folder: Path, missing: Sequence[Cell], again: Iterable[str]) -> None:
    """Remove the records of cells that are done again, and of their runs those that cannot be gone on with."""
    for path in (cell_path(folder, cell.name) for cell in missing):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{path} cannot be removed ({error.strerror}); do that yourself") from None
    for run in (folder / RUNS / name for name in again):
        if not (run / STATE).is_file():  # there is nothing to resume
            discard(run, OF_CELL)


# Scores of heads.


def scores_digest_path(path: Path) -> Path:
    """Where the digest of a file of scores is kept."""
    return path.with_suffix(".json")


def write_scores(path: Path, scores: Scores, layout: Layout) -> None:
    """Keep scores of all heads, and the digest of their file."""
    rows = [(head.site.value, head.layer, head.head, scores.get(head)) for head in all_heads(layout)]
    table = pd.DataFrame(rows, columns=["site", "layer", "head", "score"])
    write_csv(path, table)
    write_json(scores_digest_path(path), {"sha256": file_digest([path])})


class Journal(dict[str, float]):
    """Numbers by name that are kept in a file as they come, so that a run that was interrupted finds them.

    A line that was cut short counts for nothing, and is taken away: the next would go on from it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        *lines, cut = path.read_text(encoding="utf-8").split("\n") if path.is_file() else [""]
        if cut:
            whole = "".join(f"{line}\n" for line in lines)
            write_atomically(path, lambda place: place.write_text(whole, encoding="utf-8"))
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
    if not path.is_file() or read_record(scores_digest_path(path)).get("sha256") != file_digest([path]):
        return None
    return read_scores(path, layout, column="score")[1]
