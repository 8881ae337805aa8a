"""What goes wrong, on purpose: a disk that is full from some write on, and signals at some moment of a command."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


class Moments:
    """Counts the writes below a directory, and the calls of headscope's own functions, of what runs within."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writes, self.calls = folder, 0, 0

    @contextmanager
    def counted(self) -> Iterator[Moments]:
        """Within the block both are counted."""

        def wrote(_: str) -> None:
            self.writes += 1

        def called() -> None:
            self.calls += 1

        with _writes(self.folder, wrote), _calls(called):
            yield self


@contextmanager
def full_disk(folder: Path, number: int) -> Iterator[None]:
    """From write `number` below a directory on nothing can be created; that write fails also if it is a rename."""
    count = 0

    def refuse(kind: str) -> None:
        nonlocal count
        count += 1
        if count == number or (count > number and kind == "create"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _writes(folder, refuse):
        yield


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """No file can grow beyond some bytes: what writes through C++ or Rust is refused too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def signalled(number: int, call: int) -> Iterator[list[int]]:
    """A signal comes at some call of a function of headscope; gives the signals that came when nobody listened."""
    stray: list[int] = []
    count = 0

    def called() -> None:
        nonlocal count
        count += 1
        if count == call:
            sys.settrace(None)  # no more is counted
            signal.raise_signal(number)

    before = signal.signal(number, lambda received, _: stray.append(received))
    try:
        with _calls(called):
            yield stray
    finally:
        signal.signal(number, before)


@contextmanager
def _writes(folder: Path, see: Callable[[str], None]) -> Iterator[None]:
    """`see` is told of every file and directory that Python creates below `folder` ("create") and moves ("move")."""
    real = {name: getattr(os, name) for name in ("mkdir", "open", "rename", "replace")}
    root, plain = str(folder), io.open

    def mkdir(path: Any, *given: Any, **named: Any) -> None:
        if os.fspath(path).startswith(root):
            see("create")
        real["mkdir"](path, *given, **named)

    def opened(path: Any, flags: int, *given: Any, **named: Any) -> int:
        if flags & os.O_CREAT and os.fspath(path).startswith(root):
            see("create")
        return int(real["open"](path, flags, *given, **named))

    def moved(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **named: Any) -> None:
            if os.fspath(target).startswith(root):
                see("move")
            real[name](source, target, **named)

        return move

    def text(path: Any, mode: str = "r", *given: Any, **named: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and set(mode) & set("wax+") and os.fspath(path).startswith(root):
            see("create")
        return plain(path, mode, *given, **named)

    with (
        patch.multiple(os, mkdir=mkdir, open=opened, rename=moved("rename"), replace=moved("replace")),
        patch.object(io, "open", text),
        patch.object(builtins, "open", text),
    ):
        yield


@contextmanager
def _calls(see: Callable[[], None]) -> Iterator[None]:
    """`see` is called before every call of a function of headscope in this thread."""

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("headscope"):
            see()

    sys.settrace(profile)
    try:
        yield
    finally:
        sys.settrace(None)
