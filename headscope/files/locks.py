"""Locks of directories: released when the process ends, without a lock file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headscope.errors import OutputError

if sys.platform != "win32":
    import fcntl

_held: set[tuple[int, int]] = set()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Within the block this process holds the lock of a directory; OutputError where another process holds it.

    Re-entrant. On file systems without locks it does nothing.
    """
    if sys.platform == "win32":  # has no such locks
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    status = os.fstat(handle)
    key = status.st_dev, status.st_ino
    again = key in _held
    try:
        if not again:
            _lock(handle, folder)
            _held.add(key)
        yield
    finally:
        os.close(handle)
        if not again:
            _held.discard(key)


def _lock(handle: int, folder: Path) -> None:
    if sys.platform == "win32":
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise OutputError(f"another process is writing {folder}; wait for it, or choose another output") from None
    except OSError:
        return
