"""Outputs of commands: directories built beside their destination and swapped in, or written in place and resumable."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.errors import OutputError, flag
from headscope.files.output_checks import (
    Contents,
    Input,
    OutputKind,
    check_folder,
    check_inputs,
    contents,
)
from headscope.files.replace import BUILD, discard, lock_folder, recover, relocate, remove_temporary, seal, swap_in
from headscope.files.writing import hold_signals, write_atomically, write_errors

NOWHERE = Path(os.devnull)
"""The output, this very object, of a command whose result stays in memory."""


class Build:
    """A directory that is built, then swapped in: `out` is unchanged until `finish`, and complete from then on.

    A context manager: it checks that `out` may and can be written, and cleans up after a process that was killed. Left
    without `finish`, it leaves no files. One that never `writes`, as in all processes but the first, checks alone.
    """

    def __init__(
        self,
        out: Path,
        kind: OutputKind,
        *,
        inputs: Sequence[Input] = (),
        force: bool = False,
        writes: bool = True,
    ) -> None:
        self.out, self.kind, self.inputs, self.force, self.writes = out, kind, inputs, force, writes
        self.temporary: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Build:
        if self.out is NOWHERE:
            return self
        if self.writes:
            recover(self.out, self.kind)
        self._check(self.out)
        if self.writes:
            check_writable(self.out)
            if self.out.exists():
                self._stack.enter_context(lock_folder(self.out))
        return self

    def __exit__(self, *_: object) -> None:
        with hold_signals():
            if self.temporary is not None:
                shutil.rmtree(self.temporary, ignore_errors=True)
            self._stack.close()

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The directory to write into; errors of the operating system become OutputError."""
        with write_errors(self.out):
            if self.temporary is None:
                base = _base(self.out)
                with hold_signals():
                    self._stack.enter_context(_create_folder(base))
                    self.temporary = Path(tempfile.mkdtemp(dir=base, prefix=f"{BUILD}{self.out.resolve().name}-"))
                    self._stack.enter_context(lock_folder(self.temporary))
            yield self.temporary

    def finish(self, record: Mapping[str, Any], *, partial: bool = False) -> Path:
        """Write the record, with the kind and all files, and swap the directory in; returns its path.

        A `partial` result replaces nothing: where `out` holds a run it goes to OUT.new.
        """
        out = replacing_folder(self.out) if partial and contents(self.out, self.kind) else self.out
        with self.writing() as temporary, hold_signals():
            self._check(out)
            seal(temporary, self.kind, dict(record), out)
            swap_in(temporary, out, self.kind, force=self.force)
        return out

    def _check(self, out: Path) -> None:
        check_folder(out, self.kind, inputs=self.inputs, force=self.force)


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
                relocate(self.path, self.out)
                swap_in(self.path, self.out, self.kind)

    def discard(self) -> None:
        """Remove the files of this run."""
        with hold_signals():
            discard(self.path, self.kind)


@contextmanager
def workplace(
    out: Path,
    kind: OutputKind,
    *,
    inputs: Sequence[Input] = (),
    force: bool,
    resume: Path | None,
) -> Iterator[Workplace]:
    """The directory for a new run, or of one to `resume` (see `to_resume`); it exists and is locked by this process.

    OutputError as of `check_folder`, and where OUT.new would be resumed and replace what `out` holds without `force`.
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
    if resume is not None and _holds_run_of(contents(path, kind), kind):
        check_inputs(path, inputs)
    else:
        holds = bool(contents(out, kind).files)
        check_folder(out, kind, inputs=inputs, force=(force and resume is None) or not holds, resumable=True)
        if holds:
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


def clear_killed(out: Path, kind: OutputKind) -> None:
    """Remove what a killed process left at a complete output: temporary files, a replacement that had not begun."""
    new = replacing_folder(out)
    for folder in (out, new):
        recover(folder, kind)
    with suppress(OSError, OutputError), lock_folder(new):
        remove_temporary(new)
        new.rmdir()


def to_resume(out: Path, kind: OutputKind) -> Path:
    """The directory that --resume continues: OUT.new where it holds an unfinished replacement, else `out`."""
    new = replacing_folder(out)
    return new if _holds_run_of(contents(new, kind), kind) else out


def replacing_folder(out: Path) -> Path:
    """OUT.new, for a run that will replace the one in OUT."""
    out = out if out.name else out.resolve()
    return out.parent / f"{out.name}.new"


def check_writable(out: Path) -> None:
    """OutputError where a directory or file cannot be created or written to."""
    base = _base(out)
    while not base.exists():
        base = base.parent
    with write_errors(out):
        tempfile.TemporaryFile(dir=base).close()  # without a name, so that a kill leaves nothing


def _holds_run_of(holding: Contents, kind: OutputKind) -> bool:
    """Whether a directory holds a run of a kind, finished or not."""
    return holding.kind == kind.name or bool(holding.kind is None and holding.own and not holding.foreign)


def _base(out: Path) -> Path:
    """The parent of a build: that of `out`, or `out` itself where it cannot be renamed."""
    real = out.resolve()
    fixed = real.is_dir() and (os.path.ismount(real) or real == Path.cwd() or not os.access(real.parent, os.W_OK))
    return real if fixed else real.parent


@contextmanager
def _create_folder(folder: Path) -> Iterator[None]:
    """Within the block the directory and its parents exist; those created here are removed again if left empty."""
    new = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for parent in new:
            with suppress(OSError):
                parent.rmdir()


def write_beside(path: Path, write: Callable[[Path], object], *, force: bool, complete: bool) -> str:
    """Write a file that replaces another with `force` alone, as what was measured is never lost.

    What is not `complete` goes to FILE.partial, so that nobody takes it for the whole, and to FILE.new where another
    process has written FILE meanwhile; the remark that is returned says so.
    """
    if complete and (force or not path.exists()):
        write_atomically(path, write)
        return ""
    name = f"{path.name}.{'new' if complete else 'partial'}"
    free = (path.with_name(f"{name}{number}") for number in ("", *range(2, 1000)))
    alternative = next(other for other in free if not other.exists())
    write_atomically(alternative, write)
    if complete:
        return f"warning: {path} came meanwhile and stays; {alternative} has this result"
    outcome = "stays as it was" if path.exists() else "was not written"
    return f"{path} {outcome}; {alternative} has the sentences that were done"
