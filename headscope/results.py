"""What a run leaves behind: tables, arrays and a signature, written whole or not at all."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from headscope.errors import OutputError

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


def written(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a temporary name, then rename it: no half file is ever left under its own name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.", suffix=path.suffix)
    os.close(handle)
    try:
        write(Path(name))
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


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


RUN_FILES = ("run.json", "heads.csv", "similarity.npz", "pickles", "figures", "detail")


def check_folder(folder: Path, *, force: bool) -> None:
    """OutputError where an output directory cannot be used, or holds something and `force` is not given."""
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder} is a file; give a directory")
    there = sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
    if there and not force:
        raise OutputError(
            f"{folder} already holds {', '.join(there[:3])}{' …' if len(there) > 3 else ''}; "
            "choose another directory, or --force to replace the run in it"
        )


def clear_run(folder: Path) -> None:
    """Make the output directory, without what an earlier run wrote there; other files stay."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made: {error.strerror}") from None
    if not (folder / "run.json").is_file():
        return
    try:
        mine = json.loads((folder / "run.json").read_text(encoding="utf-8")).get("files", [])
    except (OSError, ValueError, AttributeError):
        mine = []
    for name in [*mine, *RUN_FILES]:
        path = folder / str(name)
        if not path.resolve().is_relative_to(folder.resolve()) or path.is_symlink():
            continue
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
