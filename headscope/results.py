"""What a run leaves behind: tables, arrays and a signature, written whole or not at all."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.files.writing import written

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Signature:
    """Everything that shapes a number, in sacreBLEU's manner: `m:confidence.voita|eos:excl|…|v:0.1.0`."""

    entries: Mapping[str, str]

    def __str__(self) -> str:
        return "|".join(f"{key}:{value}" for key, value in self.entries.items())

    def having(self, **more: str) -> Signature:
        """The same with some entries put first (or replaced in place)."""
        first = {key: value for key, value in more.items() if key not in self.entries}
        return Signature({**first, **{key: more.get(key, value) for key, value in self.entries.items()}})


@dataclass(frozen=True)
class ResultTable:
    """A table with the signature of its numbers."""

    name: str
    frame: pd.DataFrame
    signature: Signature

    def to_csv(self, folder: Path) -> Path:
        """Write `name.csv` into a folder."""
        return written(folder / f"{self.name}.csv", lambda path: self.frame.to_csv(path, index=False))

    def to_json(self) -> dict[str, Any]:
        """Signature and rows; NaN becomes null."""
        return {"signature": str(self.signature), "rows": json.loads(self.frame.to_json(orient="records"))}


def write_json(path: Path, value: Any) -> Path:
    """Write JSON, indented."""
    return written(path, lambda place: place.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write numpy arrays as a compressed .npz."""
    return written(path, lambda place: np.savez_compressed(place, **arrays))


def write_pickle(path: Path, value: Any) -> Path:
    """Write a pickle of plain containers and numpy arrays, protocol 3 as the MHR fork does; numpy 1 opens it too."""
    new, old = (f"cnumpy.{core}.multiarray\n_reconstruct\n".encode() for core in ("_core", "core"))
    content = pickle.dumps(value, protocol=3).replace(new, old)
    return written(path, lambda place: place.write_bytes(content))
