"""Settings of the whole process that make passes on a CPU faster: on in the commands, off for library users.

OpenMP's way of waiting, glibc's allocator, oneDNN's cache and torch's number of threads (`headscope.model.threads`)
belong to the process. `headscope.cli.main.run` enters `process_settings`; without it nothing here, and no pass, changes
them.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

MMAP_THRESHOLD = 32 * 2**20
"""Bytes: smaller blocks come from the heap (glibc's own largest threshold, which it moves towards by itself)."""
TRIM_THRESHOLD = 256 * 2**20
"""Bytes that may lie free at the end of the heap before they go back to the system."""
KERNELS = 4
"""Prepared kernels that oneDNN keeps: more than the kinds that a float32 pass uses (its GELU, forward and backward)."""
WAITING = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""What the OpenMP of GNU and that of Intel and LLVM read: threads without work soon sleep, and keep no core busy.

A thread of GNU's that waits looks a thousand times, some tens of microseconds, before it sleeps: between the small
operations of a pass, being woken would take as long as the operation.
"""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # the numbers of mallopt(3)
_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_USER_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_WAITING_SETTINGS = (*WAITING, "OMP_WAIT_POLICY", "KMP_LIBRARY")
_allowed = False


@contextmanager
def process_settings() -> Iterator[None]:
    """Within the block headscope may change settings of the process, as it runs a command and nothing else.

    It begins with the way in which threads wait (`WAITING`), unless the user has set that: OpenMP reads it once, when
    torch is imported. By default a thread that has done its share spins until the others have, for some milliseconds:
    where another process keeps a core busy, the thread that all wait for cannot run meanwhile.
    """
    global _allowed
    before, _allowed = _allowed, True
    chosen = any(name in os.environ for name in _WAITING_SETTINGS)
    if not chosen:
        os.environ.update(WAITING)
    try:
        yield
    finally:
        _allowed = before
        if not chosen:
            for name in WAITING:
                os.environ.pop(name, None)


def may_change_process() -> bool:
    """Whether this is the process of a command."""
    return _allowed


def keep_freed_memory() -> bool:
    """In a command, let glibc keep freed blocks for the next tensor instead of returning them; whether it does.

    A forward pass on a CPU frees activations of some megabytes after every operation. By default glibc returns them
    to the system, which clears and hands out the same pages again a moment later: up to a tenth of the time of a
    pass. At most `TRIM_THRESHOLD` bytes more stay with the process. Passes of many shapes also need
    `keep_few_kernels`, or the heap is fragmented. Nothing changes where the user has set the allocator (MALLOC_…_ or
    GLIBC_TUNABLES), and with another C library.
    """
    return _allowed and _set_mallopt()


@cache
def _set_mallopt() -> bool:
    if any(name in os.environ for name in _USER_SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD)) and bool(mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD))


def keep_few_kernels() -> None:
    """In a command, let oneDNN keep `KERNELS` of the kernels that it prepares for each shape, instead of 1,024.

    A kernel is allocated on the heap between the tensors of a pass, and stays: with every new shape the heap is more
    fragmented, and it grows with the number of batches (by a fifth from 2,000 to 20,000 sentences) although what is
    in use does not. oneDNN reads the setting when it prepares its first kernel: later it has no effect, and neither
    has it where the user has set one. Not for half precision, where matrix products are oneDNN's too and a pass needs
    more than a few.
    """
    if _allowed:
        os.environ.setdefault(_KERNELS, str(KERNELS))
