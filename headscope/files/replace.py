"""Replacing a directory by a finished new one, and recovery after an interrupted replacement; locks of directories."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from headscope.errors import OutputError
from headscope.files.output_checks import RECORDS, OutputKind, contents
from headscope.files.reading import read_record
from headscope.files.writing import TEMPORARY, hold_signals, lock, write_errors, write_json

_held_locks: set[tuple[int, int]] = set()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Within the block this process holds the lock of a directory; OutputError where another process holds it.

    Re-entrant. On file systems without locks it does nothing.
    """
    if sys.platform == "win32":  # has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    status = os.fstat(handle)
    key = status.st_dev, status.st_ino
    is_nested = key in _held_locks
    try:
        if not is_nested:
            if not lock(handle):
                raise OutputError(f"another process is writing {folder}; wait for it, or choose another output")
            _held_locks.add(key)
        yield
    finally:
        os.close(handle)
        if not is_nested:
            _held_locks.discard(key)


OLD, BUILD = f"{TEMPORARY}old", f"{TEMPORARY}build-"
"""Names of the replaced and the new directory meanwhile: `.headscope-old-NAME`, `.headscope-build-NAME-…`."""


def swap_in(new: Path, out: Path, kind: OutputKind, *, force: bool = True) -> None:
    """Move a directory to `out`, whose known files are removed; other files there are moved to the new one.

    Without `force` nothing is replaced: OutputError where another process has written `out` meanwhile.

    One rename where `out` is empty, else two (see `recover`). The entries of a directory made within `out` are moved
    one by one, the record last, so that a mount point or the current directory is kept. `out` keeps its permissions; a
    new one has what the umask leaves.
    """
    out = out.resolve()
    new.chmod(_permissions(new, out))
    if new.resolve().parent == out:
        inner = out / OLD
        inner.mkdir()
        run_files = {name.split("/")[0] for name in contents(out, kind).own}
        for name in sorted(run_files, key=lambda entry: entry != kind.record):
            (out / name).rename(inner / name)
        for path in sorted(new.iterdir(), key=lambda entry: entry.name == kind.record):
            path.rename(out / path.name)
        _remove_replaced(inner, out, kind)
        new.rmdir()
        return
    if not force or not out.exists() or not any(out.iterdir()):
        try:
            new.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            raise OutputError(f"another process has written {out} meanwhile; choose another output") from None
        return
    old = _old_path(out)
    if old.exists():
        discard(old, kind)
    out.rename(old)
    try:
        new.rename(out)
    except BaseException:
        old.rename(out)
        raise
    _remove_replaced(old, out, kind)


def _permissions(new: Path, out: Path) -> int:
    """Those of `out` where it exists, else those that a directory gets that is made like any other."""
    if out.is_dir():
        return stat.S_IMODE(out.stat().st_mode) | stat.S_IRWXU
    sample = new / f"{TEMPORARY}permissions"
    sample.mkdir()
    mode = stat.S_IMODE(sample.stat().st_mode)
    sample.rmdir()
    return mode


@contextmanager
def replacing(folder: Path, kind: OutputKind, *, force: bool = True) -> Iterator[Path]:
    """An empty directory that replaces another one at the end of the block, and is removed if the block fails."""
    temporary: Path | None = None
    recover(folder, kind)
    with write_errors(folder), ExitStack() as stack:
        try:
            with hold_signals():
                folder.parent.mkdir(parents=True, exist_ok=True)
                temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f"{BUILD}{folder.name}-"))
                stack.enter_context(lock_folder(temporary))
            yield temporary
            with hold_signals():
                swap_in(temporary, folder, kind, force=force)
        finally:
            if temporary is not None:
                with hold_signals():
                    shutil.rmtree(temporary, ignore_errors=True)


def recover(out: Path, kind: OutputKind) -> None:
    """Clean up after a killed process: an output between its two renames is put back, temporary files are removed.

    Directories that another process has locked are left alone.
    """
    out = out.resolve()
    old, inner = _old_path(out), out / OLD
    with suppress(OSError, OutputError):
        if old.is_dir():
            with lock_folder(old):
                if out.exists():
                    _remove_replaced(old, out, kind)
                else:
                    old.rename(out)
        if inner.is_dir():
            with lock_folder(out):
                if not (out / kind.record).is_file():
                    for build in out.glob(f"{BUILD}{out.name}-*"):  # what of the new run has been moved already
                        new_names = {name.split("/")[0] for name in read_record(build / kind.record).get("files", ())}
                        for name in [
                            name for name in new_names if not (build / name).exists() and (out / name).exists()
                        ]:
                            (out / name).rename(build / name)
                    for entry_path in sorted(inner.iterdir(), key=lambda entry: entry.name == kind.record):
                        entry_path.replace(out / entry_path.name)
                shutil.rmtree(inner, ignore_errors=True)
    for folder in (out.parent, out):
        with suppress(OSError):
            for path in [path for path in folder.iterdir() if path.name.startswith(f"{BUILD}{out.name}-")]:
                with suppress(OSError, OutputError), lock_folder(path):
                    shutil.rmtree(path, ignore_errors=True)


def remove_temporary(folder: Path) -> None:
    """Remove the temporary files and directories below a directory that this process has locked."""
    for directory, folders, files in os.walk(folder):
        for name in [name for name in folders if name.startswith(TEMPORARY) and name != OLD]:
            shutil.rmtree(Path(directory) / name, ignore_errors=True)
        for name in files:
            if name.startswith(TEMPORARY):
                (Path(directory) / name).unlink(missing_ok=True)


def discard(folder: Path, kind: OutputKind) -> None:
    """Remove the known files below a directory, the record last, and directories that are then empty."""
    run_files = contents(folder, kind).own
    remove_temporary(folder)
    for name in sorted(run_files, key=lambda name: name == kind.record):
        (folder / name).unlink(missing_ok=True)
    for directory, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(directory)


def seal(folder: Path, kind: OutputKind, record: dict[str, Any], out: Path) -> None:
    """Write the record of a directory that will be `out`: its kind and all its files."""
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    write_json(folder / kind.record, kind.describe(record, sorted(files | {kind.record})))
    relocate(folder, out)


def relocate(folder: Path, out: Path) -> None:
    """Replace paths below `folder` by those below `out` in all records."""
    names = {str(folder): str(out), str(folder.resolve()): str(out.resolve())}
    for path in [path for path in folder.rglob("*.json") if path.name in RECORDS]:
        before = read_record(path)
        after = _rename_values(before, names)
        if after != before:
            write_json(path, after)


def _old_path(out: Path) -> Path:
    return out.parent / f"{OLD}-{out.name}"  # `with_name` refuses the root of a file system


def _remove_replaced(old: Path, out: Path, kind: OutputKind) -> None:
    """Remove a replaced run; foreign files, added since the check, are moved to the new one."""
    with suppress(OSError):
        for name in contents(old, kind).foreign:
            if not os.path.lexists(out / name):
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (old / name).rename(out / name)
        discard(old, kind)


def _rename_values(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _rename_values(entry, names) for key, entry in value.items()}
    if isinstance(value, list):
        return [_rename_values(entry, names) for entry in value]
    if isinstance(value, str):
        for old, new in names.items():
            if value == old or value.startswith(old + os.sep):
                return new + value[len(old) :]
    return value
