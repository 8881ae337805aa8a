"""Directories that commands write: built beside their place and swapped in, or made in place and resumed there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.files.interrupts import deferred
from headscope.files.locks import held
from headscope.files.output_checks import Input, check_folder, check_inputs
from headscope.files.output_kind import Contents, OutputKind, contents, fits
from headscope.files.replace import BUILD, discard, put, recover, relocate, remove_temporary, seal
from headscope.files.writing import writing


class Build:
    """A directory in the making, used with `with`: `out` is what it was until `finish`, and complete from then on.

    Entered, it checks `out` by the rule, checks that it can be written to, and tidies up after a process that was
    killed there. Left without `finish`, it leaves nothing.
    """

    def __init__(self, out: Path, kind: OutputKind, *, inputs: Sequence[Input] = (), force: bool = False) -> None:
        self.out, self.kind, self.inputs, self.force = out, kind, inputs, force
        self.made: Path | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Build:
        recover(self.out, self.kind)
        self._check(self.out)
        check_writable(self.out)
        if self.out.exists():
            self._stack.enter_context(held(self.out))
        return self

    def __exit__(self, *_: object) -> None:
        with deferred():
            if self.made is not None:
                shutil.rmtree(self.made, ignore_errors=True)
            self._stack.close()

    @contextmanager
    def writing(self) -> Iterator[Path]:
        """The directory to write into; what the system says against it becomes an OutputError."""
        with writing(self.out):
            if self.made is None:
                with deferred():
                    self._stack.enter_context(_made(_base(self.out)))
                    self.made = Path(tempfile.mkdtemp(dir=_base(self.out), prefix=_prefix(self.out)))
                    self._stack.enter_context(held(self.made))
            yield self.made

    def finish(self, record: Mapping[str, Any], *, partial: bool = False) -> Path:
        """Write the record, with the kind and all files, and swap the directory in; returns where it lies.

        What is `partial` replaces nothing: where `out` holds a run it goes to OUT.new.
        """
        out = replacing_folder(self.out) if partial and contents(self.out, self.kind) else self.out
        with self.writing() as made, deferred():
            self._check(out)
            seal(made, self.kind, dict(record), out)
            put(made, out, self.kind)
        return out

    def _check(self, out: Path) -> None:
        check_folder(out, self.kind, inputs=self.inputs, force=self.force)


@dataclass(frozen=True)
class Workplace:
    """Where a run that can be resumed is made: in `out` itself, or in OUT.new while an older run lies in `out`."""

    path: Path
    out: Path
    kind: OutputKind

    def seal(self, record: Mapping[str, Any]) -> None:
        """Write the record, with the kind and all files that are there."""
        with deferred():
            seal(self.path, self.kind, dict(record), self.out)

    def finish(self) -> None:
        """Swap the run in, which is complete."""
        if self.path != self.out:
            with writing(self.out), deferred():
                relocate(self.path, self.out)
                put(self.path, self.out, self.kind)

    def discard(self, *, keep: tuple[str, ...] = ()) -> None:
        """Remove what this run has written, but files that fit the patterns `keep`."""
        with deferred():
            discard(self.path, self.kind, keep=keep)


@contextmanager
def workplace(
    out: Path,
    kind: OutputKind,
    *,
    inputs: Sequence[Input] = (),
    force: bool,
    resume: Path | None,
    leftover: tuple[str, ...] = (),
) -> Iterator[Workplace]:
    """Where to make a run, or `resume` one (see `to_resume`); the directory is there and no other process has it.

    OutputError by the rule of `check_folder`. What lies in `out` may be a `leftover` of a run that could not begin.
    """
    new = replacing_folder(out)
    for place in (out, new):
        recover(place, kind)
    path = resume or out
    if resume is not None and _is_of(contents(path, kind), kind):
        check_inputs(path, inputs)
    else:
        there = contents(out, kind).files
        mere = all(fits(name, leftover) for name in there)
        check_folder(out, kind, inputs=inputs, force=(force and resume is None) or mere, resumable=True)
        if not mere:
            check_folder(new, kind, force=True)
            path = new
    with ExitStack() as stack:
        for each in (out, new):
            if each.exists():
                stack.enter_context(held(each))
        if path == new and resume is None:
            with deferred():
                discard(new, kind)
        stack.enter_context(_made(path))
        stack.enter_context(held(path))
        try:
            remove_temporary(path)
            yield Workplace(path, out, kind)
        finally:
            with deferred():
                remove_temporary(path)


def to_resume(out: Path, kind: OutputKind) -> Path:
    """Which directory --resume means: OUT.new where a run lies that would have replaced another one, else `out`."""
    new = replacing_folder(out)
    return new if _is_of(contents(new, kind), kind) else out


def replacing_folder(out: Path) -> Path:
    """OUT.new, where a run is made that will replace another one."""
    out = out if out.name else out.resolve()
    return out.with_name(f"{out.name}.new")


def kept_apart(path: Path, *, complete: bool) -> Path:
    """Where a file goes that may be unfinished: it replaces none, but is FILE.new where there is one."""
    return path if complete or not path.exists() else replacing_folder(path)


def check_writable(out: Path) -> None:
    """OutputError where the directory cannot be made, or nothing can be written into it."""
    base = _base(out)
    while not base.exists():
        base = base.parent
    with writing(out):
        os.rmdir(tempfile.mkdtemp(dir=base, prefix=_prefix(out)))


def _is_of(there: Contents, kind: OutputKind) -> bool:
    """Whether a directory holds a run of a kind, or one of it that never ended."""
    return there.kind == kind.name or bool(there.kind is None and there.known and not there.foreign)


def _base(out: Path) -> Path:
    """Where a build lies: beside its place, or within a directory that cannot be renamed."""
    real = out.resolve()
    fixed = real.is_dir() and (os.path.ismount(real) or real == Path.cwd() or not os.access(real.parent, os.W_OK))
    return real if fixed else real.parent


def _prefix(out: Path) -> str:
    return f"{BUILD}{out.resolve().name}-"


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """The directory with its parents; those of them that were not there before and are empty afterwards go again."""
    new = [each for each in (folder, *folder.parents) if not each.exists()]
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    finally:
        for each in new:
            with suppress(OSError):
                each.rmdir()
