"""What the process does with memory that tensors leave behind."""

from __future__ import annotations

import ctypes
import os
from functools import cache

BLOCK = 32 * 2**20
"""Bytes: smaller blocks come from the heap (glibc's own largest threshold, which it moves towards by itself)."""
SPARE = 256 * 2**20
"""Bytes that may lie free at the end of the heap before they go back to the system."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of mallopt(3)
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@cache
def reuse_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next tensor instead of handing them back page by page; whether it does.

    A forward pass on a CPU frees activations of some megabytes after every operation. By default glibc returns them
    to the system, which clears and hands out the same pages again a moment later: up to a tenth of the time of a
    pass. At most `SPARE` bytes more stay with the process at the end of the heap, and blocks of many sizes may leave
    holes in it, so this is for many passes of one shape, not for a corpus. The setting is the process's own; it is
    left alone where the user has set one (MALLOC_…_ or GLIBC_TUNABLES), and where the C library is another.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, SPARE))
