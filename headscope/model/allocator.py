"""What the process does with memory that tensors leave behind."""

from __future__ import annotations

import ctypes
import os
from functools import cache

BLOCK = 32 * 2**20
"""Bytes: smaller blocks come from the heap (glibc's own largest threshold, which it moves towards by itself)."""
KERNELS = 4
"""Prepared kernels that oneDNN keeps: more than the kinds that a float32 pass uses (its GELU, forward and backward)."""
SPARE = 256 * 2**20
"""Bytes that may lie free at the end of the heap before they go back to the system."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # the numbers of mallopt(3)
_KERNELS = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


@cache
def reuse_freed_memory() -> bool:
    """Let glibc keep freed blocks for the next tensor instead of handing them back page by page; whether it does.

    A forward pass on a CPU frees activations of some megabytes after every operation. By default glibc returns them
    to the system, which clears and hands out the same pages again a moment later: up to a tenth of the time of a
    pass. At most `SPARE` bytes more stay with the process at the end of the heap. Passes of many shapes want
    `keep_few_kernels` as well, or the heap fills with holes. The setting is the process's own; it is left alone
    where the user has set one (MALLOC_…_ or GLIBC_TUNABLES), and where the C library is another.
    """
    if any(name in os.environ for name in _SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_MMAP_THRESHOLD, BLOCK)) and bool(mallopt(_TRIM_THRESHOLD, SPARE))


def keep_few_kernels() -> None:
    """Let oneDNN keep `KERNELS` of the kernels that it prepares, one for each shape of a batch, instead of 1,024.

    Each lies in the heap where a pass had its tensors, and stays; every new shape then finds the heap cut up in
    another way, and it grows with the number of batches (by a fifth from 2,000 to 20,000 sentences) although what is
    in use does not. oneDNN reads the setting when it prepares its first kernel: later it has no effect, and neither
    has it where the user has set one. Not for half precision, where matrix products are oneDNN's too and a pass needs
    more than a few.
    """
    os.environ.setdefault(_KERNELS, str(KERNELS))
