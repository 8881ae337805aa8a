"""Checks of outputs: every command that writes makes them before it begins, and again before it replaces files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from headscope.errors import OutputError, flag, shortlist
from headscope.files.reading import read_record
from headscope.files.writing import TEMPORARY

RECORDS = ("run.json", "pruning.json", "sweep.json", "conversion.json")
"""The records of all kinds of runs."""


@dataclass(frozen=True)
class OutputKind:
    """The files that one command writes into a directory.

    `record` is the JSON file with `"kind": name` and the list of the other files. `writes` are patterns of all files
    that the command may write; if `record` is empty, these alone say which files are the run's. A directory without its
    record that has only `partial` files is an unfinished run. An `extensible` run may be continued and writes its
    record first, so all files that match `writes` are its own.
    """

    name: str
    title: str
    record: str
    writes: tuple[str, ...]
    partial: tuple[str, ...] = ()
    extensible: bool = False

    def describe(self, record: Mapping[str, Any], files: Iterable[str] | None = None) -> dict[str, Any]:
        """A record with the kind and the list of files (default: the patterns `writes`)."""
        return {"kind": self.name, **record, "files": list(self.writes if files is None else files)}

    def in_folder(self, folder: str) -> tuple[str, ...]:
        """The patterns of a run of this kind in a subdirectory of another run."""
        return tuple(f"{folder}/{pattern}" for pattern in (*filter(None, [self.record]), *self.writes))


@dataclass(frozen=True)
class Contents:
    """The files below a directory: the run's `own`, which may be removed, and `foreign` ones.

    `kind` is the one in the record, None without a readable record.
    """

    own: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    kind: str | None = None
    record: Mapping[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there are any files."""
        return bool(self.own or self.foreign)

    @property
    def files(self) -> tuple[str, ...]:
        """All files, foreign ones first."""
        return (*self.foreign, *self.own)


def contents(folder: Path, kind: OutputKind) -> Contents:
    """The files of a directory, split into those of a run of a kind and foreign ones.

    A file is the run's own if the record lists it and the kind writes such files. Links are foreign and not followed.
    Temporary files of a killed process are left out.
    """
    files = sorted(_files(folder))
    record = read_record(folder / kind.record) if kind.record in files else {}
    kind_name = record.get("kind") if isinstance(record.get("kind"), str) else None
    own_names = record["files"] if isinstance(record.get("files"), list) else []

    def is_own(name: str) -> bool:
        if (folder / name).is_symlink():
            return False
        if kind.record and kind_name == kind.name:
            return name == kind.record or (matches(name, kind.writes) and (kind.extensible or name in own_names))
        return kind.record not in files and matches(name, kind.partial if kind.record else kind.writes)

    run_files = tuple(name for name in files if is_own(name))
    foreign = tuple(name for name in files if name not in run_files)
    return Contents(run_files, foreign, kind_name, record)


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


CHECKPOINT_OPTIONS = ("checkpoint", "init", "against")
"""Options that name a checkpoint."""


class Input(NamedTuple):
    """A path that a command reads. An output may neither be nor contain it; a checkpoint may not contain the output."""

    path: Path
    checkpoint: bool = False


def inputs_of(*options: Any) -> list[Input]:
    """The existing paths that configs (or mappings of options) name as inputs, which no output may replace.

    These are the values of all options but those declared `is_output` (`headscope.config.option`), also in lists and
    mappings. A string may also be a name or a list of heads; it counts if there is such a file.
    """
    named_values = [(name, value) for part in options for name, value in _named_values(part)]
    return [
        Input(Path(value), name in CHECKPOINT_OPTIONS)
        for name, value in named_values
        if (os.path.exists if name in CHECKPOINT_OPTIONS or isinstance(value, Path) else os.path.isfile)(value)
    ]


def _named_values(options: Any) -> Iterator[tuple[str, str | Path]]:
    """Name and value of every option that could be a path; entries of lists and mappings one by one."""
    if is_dataclass(options):
        options = {
            entry.name: value
            for entry in fields(options)
            if not entry.metadata.get("is_output") and not isinstance(value := getattr(options, entry.name), list)
        }
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _named_values(value)
        elif isinstance(value, (tuple, list)):
            yield from ((name, part) for part in value if isinstance(part, (str, Path)))
        elif isinstance(value, (str, Path)) and str(value):
            yield name, value


def check_inputs(out: Path, inputs: Iterable[Input]) -> None:
    """OutputError where an output is or contains an input, or is inside a checkpoint; links are followed."""
    for entry in inputs:
        inside = entry.path.iterdir() if entry.path.is_dir() else ()
        targets = [path.resolve() for path in inside if path.is_symlink() and path.exists()]
        if any(_is_inside(path, out) for path in (entry.path, *targets)):
            content = "the checkpoint itself" if entry.checkpoint else f"{entry.path}, which is read"
            raise OutputError(f"{out} holds {content}; choose another output")
        if entry.checkpoint and entry.path.is_dir() and _is_inside(out, entry.path):
            raise OutputError(f"{out} lies in the checkpoint {entry.path}; choose an output outside it")


def check_folder(
    out: Path, kind: OutputKind, *, inputs: Iterable[Input] = (), force: bool, resumable: bool = False
) -> None:
    """OutputError where a command must not write to a directory.

    It must not be or contain an input, or lie in a checkpoint. It must be empty, or with `force` hold nothing but a run
    of `kind`. With `resumable` the message mentions --resume.
    """
    check_inputs(out, inputs)
    if out.exists() and not out.is_dir():
        raise OutputError(f"{out} is a file, and results go into a folder of their own; give another name")
    if out.resolve() == Path.cwd() or os.path.ismount(out):
        raise OutputError(f"{out} cannot be replaced (current directory or mount point); name a folder in it")
    existing = contents(out, kind)
    if existing and not force:
        names = shortlist(sorted({name.split("/")[0] for name in existing.files}))
        advice = "choose another directory"
        if not existing.foreign:
            go_on = f"{flag.resume} to go on with it, " if resumable else ""
            advice += f", {go_on}or {flag.force} to replace the run in it"
        raise OutputError(f"{out} already holds {names}; {advice}")
    if existing.foreign:
        what = f"holds {shortlist(existing.foreign)}, which no {kind.title} wrote"
        if existing.kind not in (None, kind.name):
            what = f"is a run of another kind ({existing.kind})"
        raise OutputError(f"{out} {what}: {flag.force} does not replace it; choose another output")


def check_file(path: Path, *, inputs: Iterable[Input] = (), force: bool) -> None:
    """OutputError where a command must not write a file: an input, or without `force` any file that exists.

    Even `force` replaces no file in a folder that is read, and of a run only its figures and its page.
    """
    if path.is_dir():
        raise OutputError(f"{path} is a directory; give a file name")
    check_inputs(path, inputs := list(inputs))
    if path.exists() and (folder := next((part.path for part in inputs if _is_inside(path, part.path)), None)):
        raise OutputError(f"{path} is a file of {folder}, which is read; choose another name")
    if path.exists() and not force:
        raise OutputError(f"{path} exists; choose another name, or {flag.force} to replace it")
    if path.exists() and (run := _run_of(path)) is not None:
        raise OutputError(f"{path} is part of the run in {run}; choose another name")


def _run_of(path: Path) -> Path | None:
    """The directory of the run that a file is part of; None if it is part of none."""
    path = path.resolve()
    for folder in path.parents[:4]:
        name = path.relative_to(folder).as_posix()
        for record in RECORDS:
            if name == record and "kind" in read_record(path):
                return folder
            files = read_record(folder / record).get("files")
            if isinstance(files, list) and name in files and not name.startswith("figures/") and name != "report.html":
                return folder
    return None


def _is_inside(inner: Path, outer: Path) -> bool:
    """Whether a path is another one or below it, after resolving links."""
    if not outer.exists():
        return False
    inner = inner.resolve()
    return any(parent.exists() and os.path.samefile(parent, outer) for parent in (inner, *inner.parents))
