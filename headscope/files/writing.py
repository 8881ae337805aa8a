"""Writing files atomically; errors of the operating system in one line; interrupts that never come half-way.

SIGINT, SIGTERM and SIGHUP all raise KeyboardInterrupt, but never while directories are swapped.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.errors import HeadscopeError, OutputError

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
received_signals: list[int] = []
"""The signals received since `listening` began."""


def exit_status() -> int:
    """128 + the number of the first signal received: 130 for Ctrl-C (also where none is recorded), 143 for SIGTERM."""
    return 128 + (received_signals[0] if received_signals else signal.SIGINT)


def ending_signals() -> list[signal.Signals]:
    """The signals that end a command: SIGINT, and the others unless they are ignored (SIGHUP under nohup)."""
    return [number for number in SIGNALS if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def handling(handler: Callable[[int, Any], None], numbers: Iterable[int]) -> Iterator[None]:
    """Within the block `handler` handles these signals; afterwards their earlier handlers do."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier if earlier is not None else signal.SIG_DFL)


@contextmanager
def listening() -> Iterator[None]:
    """Within the block `ending_signals` raise KeyboardInterrupt, and `received_signals` lists them."""
    received_signals.clear()

    def interrupt(number: int, _: object) -> None:
        received_signals.append(number)
        raise KeyboardInterrupt

    with handling(interrupt, ending_signals()):
        yield


@contextmanager
def hold_signals() -> Iterator[None]:
    """Within the block signals are held back; afterwards the first one is delivered to its previous handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    try:
        signals = [number for number in SIGNALS if signal.getsignal(number) not in (None, signal.SIG_IGN)]
        with handling(lambda number, _: waiting.append(number), signals):
            yield
    finally:
        if waiting:
            signal.raise_signal(waiting[0])


TEMPORARY = ".headscope-"
"""Prefix of all temporary files and directories."""

# Messages of libraries that write through C++ and Rust: safetensors, tokenizers, torch.
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_TORCH_WRITER = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|basic_ios::clear|iostream error")


def write_failure(error: BaseException | None) -> str | None:
    """The operating system's message for a failed write; None for another error."""
    reason = None
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error) or type(error).__name__
        if match := _OS_ERROR.search(str(error)):
            return os.strerror(int(match[1]))
        if isinstance(error, RuntimeError) and _TORCH_WRITER.search(str(error)):
            reason = "the disk is full, or the file grew too large"
        error = error.__cause__ or (error.__context__ if reason else None)
    return reason


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Within the block errors of the operating system become an OutputError about `path`."""
    try:
        yield
    except HeadscopeError:
        raise
    except Exception as error:
        reason = write_failure(error)
        if reason is None:
            raise
        raise OutputError(f"cannot write {path}: {reason}") from None


@contextmanager
def replacing_file(path: Path) -> Iterator[Path]:
    """A temporary path, renamed to `path` at the end of the block, so that `path` never holds half a file.

    OutputError where writing fails.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.stem}-{secrets.token_hex(4)}{path.suffix}")
    with write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield temporary
            with hold_signals():
                os.replace(temporary, path)
        except BaseException:
            with hold_signals():
                temporary.unlink(missing_ok=True)
            raise


def write_atomically(path: Path, content: str | bytes | Callable[[Path], object]) -> Path:
    """Write a file as `replacing_file` does; `content` may be a function that writes it."""
    with replacing_file(path) as temporary:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write JSON, indented."""
    return write_atomically(path, json.dumps(value, indent=2) + "\n")


def save_torch(value: Any, path: Path) -> None:
    """torch.save followed by fsync; OSError where writing fails (torch itself raises RuntimeError)."""
    import torch

    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
