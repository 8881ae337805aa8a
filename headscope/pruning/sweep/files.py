"""The cells of a sweep on disk: one small file each, whole or not there at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headscope.errors import DataError
from headscope.files.reading import read_object
from headscope.files.writing import written
from headscope.pruning.sweep.config import Cell

CELLS = "cells"


def cell_path(folder: Path, name: str) -> Path:
    """The file of a cell."""
    return folder / CELLS / f"{name}.json"


def write_cell(folder: Path, cell: Cell, found: dict[str, Any]) -> None:
    """Keep the record of a finished cell."""
    text = json.dumps(found) + "\n"
    written(cell_path(folder, cell.name), lambda place: place.write_text(text, encoding="utf-8"))


def read_cell(folder: Path, name: str) -> dict[str, Any]:
    """The record of a finished cell; DataError for a file that is none."""
    path = cell_path(folder, name)
    try:
        found = read_object(path)
        Cell(**found["cell"])
        return {**found, "kept": list(found["kept"]), "sums": list(found["sums"])}
    except (DataError, KeyError, TypeError) as error:
        detail = " ".join(str(error).split())[:160]
        raise DataError(f"{path} is no finished cell ({detail}); remove it, and it is made anew") from None


def cell_names(folder: Path) -> list[str]:
    """Names of the cells that are finished."""
    return sorted(path.stem for path in (folder / CELLS).glob("*.json") if not path.name.startswith("."))
