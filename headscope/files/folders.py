"""Directories that commands write: built beside their destination and swapped in, or written in place and resumable.

A process that is killed leaves the old directory or the new one; the next command puts it right (`recover`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.errors import OutputError, flag, restate
from headscope.files.output_checks import RECORDS, Contents, Input, OutputKind, check_folder, check_inputs, contents
from headscope.files.writing import TEMPORARY, hold_signals, write_atomically, write_errors, write_json

NOWHERE = Path(os.devnull)
"""The `out` of a command that keeps its result in memory; compared by identity."""
OLD, BUILD = f"{TEMPORARY}old-", f"{TEMPORARY}build-"
"""Prefixes of the temporary names of a replaced and of a new directory, before the directory's own name."""
_held_locks: set[tuple[int, int]] = set()


class Build:
    """A directory that is built, then swapped in: `out` is unchanged until `finish`, and complete from then on.

    A context manager: it checks that `out` may and can be written, and cleans up after a process that was killed.
    Without `finish` no files remain. All processes but the first have `writes=False` and only check.
    """

    def __init__(
        self, out: Path, kind: OutputKind, *, inputs: Sequence[Input] = (), force: bool = False, writes: bool = True
    ) -> None:
        self.out, self.kind, self.inputs, self.force, self.writes = out, kind, inputs, force, writes
        self.temporary: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Build:
        if self.out is NOWHERE:
            return self
        if self.writes:
            recover(self.out, self.kind)
        check_folder(self.out, self.kind, inputs=self.inputs, force=self.force)
        if self.writes:
            check_writable(self.out)
            if self.out.exists():
                self._stack.enter_context(lock_folder(self.out))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The directory to write into; errors of the operating system become OutputError."""
        with write_errors(self.out):
            if self.temporary is None:
                self.temporary = self._stack.enter_context(_new_folder_beside(self.out))
            yield self.temporary

    def finish(self, record: Mapping[str, Any], *, partial: bool = False) -> Path:
        """Write the record, which lists the kind and all files, and swap the directory in; returns its path.

        A `partial` result does not replace a run: if `out` holds one, it goes to OUT.new.
        """
        out = replacing_folder(self.out) if partial and contents(self.out, self.kind) else self.out
        with self.writing() as temporary, hold_signals():
            check_folder(out, self.kind, inputs=self.inputs, force=self.force)
            seal(temporary, self.kind, record)
            swap_in(temporary, out, self.kind, force=self.force)
        return out


@contextmanager
def replacing(folder: Path, kind: OutputKind, *, force: bool = True) -> Iterator[Path]:
    """An empty directory that replaces another one at the end of the block, and is removed if the block fails."""
    recover(folder, kind)
    with write_errors(folder), _new_folder_beside(folder) as temporary:
        yield temporary
        with hold_signals():
            swap_in(temporary, folder, kind, force=force)


@contextmanager
def _new_folder_beside(out: Path) -> Iterator[Path]:
    """A new, locked directory beside another one, which is removed at the end unless it was renamed."""
    out = out.resolve()
    temporary = out.parent / f"{BUILD}{out.name}-{secrets.token_hex(4)}"
    with ExitStack() as stack:
        try:
            with hold_signals():
                stack.enter_context(_create_folder(out.parent))
                temporary.mkdir()
                stack.enter_context(lock_folder(temporary))
            yield temporary
        finally:
            with hold_signals():
                shutil.rmtree(temporary, ignore_errors=True)


@dataclass(frozen=True)
class Workplace:
    """The directory of a resumable run: `out` itself, or OUT.new while `out` holds an older run."""

    path: Path
    out: Path
    kind: OutputKind

    def finish(self) -> None:
        """Swap the complete run in."""
        if self.path != self.out:
            with write_errors(self.out), hold_signals():
                swap_in(self.path, self.out, self.kind)

    def discard(self) -> None:
        """Remove the files of this run."""
        with hold_signals():
            discard(self.path, self.kind)


@contextmanager
def workplace(
    out: Path, kind: OutputKind, *, inputs: Sequence[Input] = (), force: bool, resume: Path | None
) -> Iterator[Workplace]:
    """The directory of a new run, or of the one to `resume` (see `to_resume`), created and locked by this process.

    OutputError as of `check_folder`, and where a resumed OUT.new would replace the files in `out` without `force`.
    """
    new = replacing_folder(out)
    for folder in (out, new):
        recover(folder, kind)
    path = resume or out
    if path == new and not force and contents(out, kind):
        raise OutputError(
            f"{new} holds an interrupted run that would replace {out}; give {flag.force} to go on with it, or "
            "another output"
        )
    if resume is not None and _is_run(contents(path, kind), kind):
        check_inputs(path, inputs)
    else:
        has_files = bool(contents(out, kind))
        check_folder(out, kind, inputs=inputs, force=(force and resume is None) or not has_files, resumable=True)
        if has_files:
            check_folder(new, kind, force=True)
            path = new
    with ExitStack() as stack:
        for folder in (out, new):
            if folder.exists():
                stack.enter_context(lock_folder(folder))
        if path == new and resume is None:
            with hold_signals():
                discard(new, kind)
        stack.enter_context(_create_folder(path))
        stack.enter_context(lock_folder(path))
        try:
            remove_temporary(path)
            yield Workplace(path, out, kind)
        finally:
            with hold_signals():
                remove_temporary(path)


def to_resume(out: Path, kind: OutputKind) -> Path:
    """The directory that --resume continues: OUT.new if it holds a run that will replace `out`, else `out`."""
    new = replacing_folder(out)
    return new if _is_run(contents(new, kind), kind) else out


def replacing_folder(out: Path) -> Path:
    """OUT.new, for a run that will replace the one in OUT."""
    out = out if out.name else out.resolve()
    return out.parent / f"{out.name}.new"


def check_writable(out: Path) -> None:
    """OutputError where a directory or file cannot be created beside others."""
    base = out.resolve().parent
    while not base.exists():
        base = base.parent
    with write_errors(out):
        tempfile.TemporaryFile(dir=base).close()  # without a name, so that a kill leaves nothing


def _is_run(found: Contents, kind: OutputKind) -> bool:
    """Whether the contents of a directory are a run of a kind, finished or not."""
    return found.kind == kind.name or bool(found.kind is None and found.own and not found.foreign)


@contextmanager
def _create_folder(folder: Path) -> Iterator[None]:
    """Within the block the directory and its parents exist; those created here are removed again if left empty."""
    created = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in created:
            with suppress(OSError):
                parent.rmdir()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Within the block this process holds the lock of a directory; OutputError where another process holds it.

    Re-entrant. On file systems without locks it does nothing.
    """
    if sys.platform == "win32":  # it has no fcntl
        yield
        return
    import fcntl

    handle = os.open(folder, os.O_RDONLY)
    status = os.fstat(handle)
    key = status.st_dev, status.st_ino
    is_nested = key in _held_locks
    try:
        if not is_nested:
            problem = f"another process is writing {folder}; wait for it, or choose another output"
            with suppress(OSError), restate(OutputError, problem, BlockingIOError):
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _held_locks.add(key)
        yield
    finally:
        os.close(handle)
        if not is_nested:
            _held_locks.discard(key)


def swap_in(new: Path, out: Path, kind: OutputKind, *, force: bool = True) -> None:
    """Move the directory `new` to `out`: the run's files there are removed, foreign files are moved into `new`.

    This takes one rename if `out` is empty or nothing may be replaced, else two (see `recover`). Paths in the records
    are changed to `out`.
    """
    relocate(new, out)
    out = out.resolve()
    old = _old_path(out)
    if force and out.exists() and any(out.iterdir()):
        if old.exists():
            discard(old, kind)
        out.rename(old)
    try:
        new.rename(out)  # OSError if another process has written `out` meanwhile
    except BaseException:
        if not out.exists() and old.exists():
            old.rename(out)
        raise
    _remove_replaced(old, out, kind)


def recover(out: Path, kind: OutputKind) -> None:
    """Clean up after a killed process: undo the first of two renames, and remove temporary directories.

    Directories that another process has locked are left alone.
    """
    out = out.resolve()
    old = _old_path(out)
    with suppress(OSError, OutputError), lock_folder(old):
        if out.exists():
            _remove_replaced(old, out, kind)
        else:
            old.rename(out)
    with suppress(OSError):
        for path in [path for path in out.parent.iterdir() if path.name.startswith(f"{BUILD}{out.name}-")]:
            with suppress(OSError, OutputError), lock_folder(path):
                shutil.rmtree(path, ignore_errors=True)


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files and directories below a directory that this process has locked."""
    for directory, folders, files in os.walk(folder):
        for name in [name for name in folders if name.startswith(TEMPORARY) and not name.startswith(OLD)]:
            shutil.rmtree(Path(directory) / name, ignore_errors=True)
        for name in files:
            if name.startswith(TEMPORARY):
                (Path(directory) / name).unlink(missing_ok=True)


def discard(folder: Path, kind: OutputKind) -> None:
    """Remove a run's files from a directory, its record last, and then empty directories."""
    run_files = contents(folder, kind).own
    remove_temporary(folder)
    for name in sorted(run_files, key=lambda name: name == kind.record):
        (folder / name).unlink(missing_ok=True)
    for directory, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)


def seal(folder: Path, kind: OutputKind, record: Mapping[str, Any]) -> None:
    """Write the record of a directory: its kind and all its files."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    write_json(folder / kind.record, kind.describe(record, sorted(files | {kind.record})))


def relocate(folder: Path, out: Path) -> None:
    """Replace paths below `folder` by those below `out` in all records."""
    moves = {folder: out, folder.resolve(): out.resolve()}
    names = {json.dumps(str(old))[1:-1]: json.dumps(str(new))[1:-1] for old, new in moves.items()}
    old_names = re.compile(rf"""(?<=")({"|".join(map(re.escape, names))})(?=["/\\])""")
    for path in [path for name in RECORDS for path in folder.rglob(name)]:
        before = path.read_text(encoding="utf-8")
        after = old_names.sub(lambda match: names[match[0]], before)
        if after != before:
            write_atomically(path, after)


def _old_path(out: Path) -> Path:
    return out.parent / f"{OLD}{out.name}"  # `with_name` refuses the root of a file system


def _remove_replaced(old: Path, out: Path, kind: OutputKind) -> None:
    """Remove the directory of a replaced run; files that were added to it since the check are moved to `out`."""
    with suppress(OSError):
        for name in contents(old, kind).foreign:
            if not os.path.lexists(out / name):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (old / name).rename(out / name)
        discard(old, kind)
