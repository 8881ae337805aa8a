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
    def count(self) -> Iterator[Moments]:
        """Count both within the block."""

        def on_write(_: str) -> None:
            self.writes += 1

        def on_call() -> None:
            self.calls += 1

        with _writes(self.folder, on_write), _calls(on_call):
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
def signal_at(number: int, call: int) -> Iterator[list[int]]:
    """A signal comes at some call of a function of headscope; yields the signals that came without a listener."""
    stray: list[int] = []
    count = 0

    def on_call() -> None:
        nonlocal count
        count += 1
        if count == call:
            sys.settrace(None)  # no more is counted
            signal.raise_signal(number)

    before = signal.signal(number, lambda signum, _: stray.append(signum))
    try:
        with _calls(on_call):
            yield stray
    finally:
        signal.signal(number, before)


@contextmanager
def _writes(folder: Path, on_write: Callable[[str], None]) -> Iterator[None]:
    """Call `on_write` for every file and directory that Python creates below `folder` ("create") or moves ("move")."""
    real = {name: getattr(os, name) for name in ("mkdir", "open", "rename", "replace")}
    root, plain = str(folder), io.open

    def mkdir(path: Any, *args: Any, **kwargs: Any) -> None:
        if os.fspath(path).startswith(root):
            on_write("create")
        real["mkdir"](path, *args, **kwargs)

    def open_file(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and os.fspath(path).startswith(root):
            on_write("create")
        return int(real["open"](path, flags, *args, **kwargs))

    def make_move(name: str) -> Callable[..., None]:
        def move(source: Any, target: Any, **kwargs: Any) -> None:
            if os.fspath(target).startswith(root):
                on_write("move")
            real[name](source, target, **kwargs)

        return move

    def open_text(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(path, (str, os.PathLike)) and set(mode) & set("wax+") and os.fspath(path).startswith(root):
            on_write("create")
        return plain(path, mode, *args, **kwargs)

    with (
        patch.multiple(os, mkdir=mkdir, open=open_file, rename=make_move("rename"), replace=make_move("replace")),
        patch.object(io, "open", open_text),
        patch.object(builtins, "open", open_text),
    ):
        yield


@contextmanager
def _calls(on_call: Callable[[], None]) -> Iterator[None]:
    """Call `on_call` before every call of a function of headscope in this thread."""

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and str(frame.f_globals.get("__name__", "")).startswith("headscope"):
            on_call()

    sys.settrace(profile)
    try:
        yield
    finally:
        sys.settrace(None)
