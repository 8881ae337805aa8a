"""Writing files atomically; errors of the operating system in one line."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headscope.errors import HeadscopeError, OutputError
from headscope.files.interrupts import deferred

TEMPORARY = ".headscope-"
"""Prefix of all temporary files and directories."""

# Messages of libraries that write through C++ and Rust.
_OS_ERROR = re.compile(r"(?:I/O error: )?([A-Z][^:()]*) \(os error \d+\)")
_TORCH_WRITER = re.compile(r"PytorchStreamWriter failed|unexpected pos \d+ vs|basic_ios::clear|iostream error")


def write_failure(error: BaseException | None) -> str | None:
    """The operating system's message for a failed write; None for another error."""
    reason = None
    while error is not None:
        if isinstance(error, OSError):
            return error.strerror or str(error) or type(error).__name__
        if type(error).__name__ == "SafetensorError" and (match := _OS_ERROR.search(str(error))):
            return match[1].strip()
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


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Write a file under a temporary name, then rename it: no half file is ever left under its own name.

    OutputError where that fails.
    """
    temporary: Path | None = None
    with write_errors(path):
        try:
            with deferred():
                path.parent.mkdir(parents=True, exist_ok=True)
                handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{TEMPORARY}{path.stem}-", suffix=path.suffix)
                temporary = Path(name)
                os.close(handle)
            write(temporary)
            with deferred():
                temporary.chmod(0o644)
                os.replace(temporary, path)
        except BaseException:
            if temporary is not None:
                with deferred():
                    temporary.unlink(missing_ok=True)
            raise
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write JSON, indented."""
    text = json.dumps(value, indent=2) + "\n"
    return write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def save_torch(value: Any, path: Path) -> None:
    """torch.save followed by fsync; OSError where writing fails (torch itself raises RuntimeError)."""
    import torch

    with path.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
