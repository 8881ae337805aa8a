"""What headscope leaves in a directory, and which of the files there it may take away again."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headscope.files.reading import read_record
from headscope.files.writing import TEMPORARY

RECORDS = ("run.json", "pruning.json", "sweep.json", "lambdas.json", "conversion.json", "demo.json")
"""The records of all kinds of runs."""

_ENDINGS = (
    *("json", "safetensors", "toml", "txt", "py", "pt", "npz", "model", "codes", "bpe", "voc", "vocab", "jinja", "md"),
    *("onnx", "onnx.data", "bin"),
)
MODEL_FILES = tuple(f"*.{ending}" for ending in _ENDINGS)
"""Files of a checkpoint directory, of whatever format."""


@dataclass(frozen=True)
class OutputKind:
    """What one command writes into a directory.

    `record` is the JSON file that says `"kind": name` and names the other files (empty: there is none, and names alone
    decide); `writes` are patterns of all that the command may write; a directory without record that holds
    `unfinished` alone is of a run that never ended. A run that `goes_on`, and can be added to, writes its record
    first: all that it may write is known.
    """

    name: str
    title: str
    record: str
    writes: tuple[str, ...]
    unfinished: tuple[str, ...] = ()
    goes_on: bool = False

    def described(self, record: Mapping[str, Any], files: Iterable[str] | None = None) -> dict[str, Any]:
        """A record with the kind and the files; of a run that goes on, patterns of all that it may write."""
        return {"kind": self.name, **record, "files": list(self.writes if files is None else files)}

    def within(self, folder: str) -> tuple[str, ...]:
        """The patterns of a run of this kind in a directory of another one."""
        return tuple(f"{folder}/{pattern}" for pattern in (*filter(None, [self.record]), *self.writes))


@dataclass(frozen=True)
class Contents:
    """The files below a directory: `known` may be removed with the run, `foreign` are somebody else's.

    `kind` is what the record says of itself, None where there is no record that can be read.
    """

    known: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    kind: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return bool(self.known or self.foreign)

    @property
    def files(self) -> tuple[str, ...]:
        """All of them, foreign ones first."""
        return (*self.foreign, *self.known)


def contents(folder: Path, kind: OutputKind) -> Contents:
    """What a directory holds, as a run of a kind sees it.

    A file is known if the record names it and the kind writes such files. Links are never followed, and always
    foreign. Temporary files that a killed process left do not count.
    """
    files = sorted(_files(folder))
    record = read_record(folder / kind.record) if kind.record in files else {}
    said = record.get("kind") if isinstance(record.get("kind"), str) else None
    plain = [name for name in files if not (folder / name).is_symlink()]
    if not kind.record:
        known = {name for name in plain if fits(name, kind.writes)}
    elif said == kind.name:
        known = {name for name in plain if name == kind.record or (fits(name, kind.writes) and _named(name, record))}
        known |= {name for name in plain if kind.goes_on and fits(name, kind.writes)}
    elif kind.record not in files and kind.unfinished:
        known = {name for name in plain if fits(name, kind.unfinished)}
    else:
        known = set()
    foreign = [name for name in files if name not in known]
    return Contents(tuple(sorted(known)), tuple(foreign), said, record)


def _named(name: str, record: Mapping[str, Any]) -> bool:
    files = record.get("files")
    return isinstance(files, list) and name in files


def _files(folder: Path) -> Iterable[str]:
    """Everything below a directory that is no directory itself, with links to directories."""
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
        links = [name for name in folders if (Path(place) / name).is_symlink()]
        for name in [*files, *links]:
            if not name.startswith(TEMPORARY):
                yield (Path(place) / name).relative_to(folder).as_posix()


def fits(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name fits any of some patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
