"""Kinds of output directories: the files that each command writes, and may therefore remove."""

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


@dataclass(frozen=True)
class OutputKind:
    """The files that one command writes into a directory.

    `record` is the JSON file with `"kind": name` and the list of the other files (empty: no record, `writes` decides);
    `writes` are patterns of all files that the command may write; a directory without a record that contains only
    `unfinished` files is that of an unfinished run. A run that `goes_on` can be extended later and writes its record
    first, so all files that match `writes` are its own.
    """

    name: str
    title: str
    record: str
    writes: tuple[str, ...]
    unfinished: tuple[str, ...] = ()
    extensible: bool = False

    def described(self, record: Mapping[str, Any], files: Iterable[str] | None = None) -> dict[str, Any]:
        """A record with the kind and the files; by default the patterns of all that the run may write."""
        return {"kind": self.name, **record, "files": list(self.writes if files is None else files)}

    def in_folder(self, folder: str) -> tuple[str, ...]:
        """The patterns of a run of this kind in a subdirectory of another run."""
        return tuple(f"{folder}/{pattern}" for pattern in (*filter(None, [self.record]), *self.writes))


@dataclass(frozen=True)
class Contents:
    """The files below a directory: `known` are of the run and may be removed, `foreign` are not.

    `kind` is that of the record, None without a readable record.
    """

    known: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    kind: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there are any files."""
        return bool(self.known or self.foreign)

    @property
    def files(self) -> tuple[str, ...]:
        """All files, foreign ones first."""
        return (*self.foreign, *self.known)


def contents(folder: Path, kind: OutputKind) -> Contents:
    """The files of a directory, as a run of a kind has to treat them.

    A file is known if the record lists it and the kind writes such files. Links are not followed, and are foreign.
    Temporary files of a killed process are ignored.
    """
    files = sorted(_files(folder))
    record = read_record(folder / kind.record) if kind.record in files else {}
    kind_name = record.get("kind") if isinstance(record.get("kind"), str) else None
    plain = [name for name in files if not (folder / name).is_symlink()]
    if not kind.record:
        known = {name for name in plain if matches(name, kind.writes)}
    elif kind_name == kind.name:
        known = {name for name in plain if name == kind.record or (matches(name, kind.writes) and _named(name, record))}
        known |= {name for name in plain if kind.extensible and matches(name, kind.writes)}
    elif kind.record not in files and kind.unfinished:
        known = {name for name in plain if matches(name, kind.unfinished)}
    else:
        known = set()
    foreign = [name for name in files if name not in known]
    return Contents(tuple(sorted(known)), tuple(foreign), kind_name, record)


def _named(name: str, record: Mapping[str, Any]) -> bool:
    files = record.get("files")
    return isinstance(files, list) and name in files


def _files(folder: Path) -> Iterable[str]:
    """Relative paths of all files below a directory, and of links to directories."""
    for directory, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(TEMPORARY)]
        links = [name for name in folders if (Path(directory) / name).is_symlink()]
        for name in [*files, *links]:
            if not name.startswith(TEMPORARY):
                yield (Path(directory) / name).relative_to(folder).as_posix()


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name matches any of the patterns."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
