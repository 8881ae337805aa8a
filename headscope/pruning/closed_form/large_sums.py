"""Where the sums of all layers are kept: beside the model, in the CPU's memory, or in files, as they fit.

A matrix of squared width for every layer is more than a model's own attention weights. Sums that would take more than
a quarter of the free memory of the model's device are kept in the CPU's; those that would take more than a quarter of
that are kept in files (in TMPDIR), which the operating system holds in memory only as far as there is room.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from typing import Literal

import torch
from torch import Tensor

Kept = Literal["device", "cpu", "disk"]
SHARE = 4  # the part of free memory that sums may take is 1 / SHARE


class LargeSums:
    """Keeps tensors that together have `size` bytes; `place` says where."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.place = choose_place(size, device)

    def keep(self, values: Tensor) -> Tensor:
        """The same values, kept where there is room; sums are added to it in place."""
        if self.place == "device":
            return values
        return values.cpu() if self.place == "cpu" else in_file(values)


def choose_place(size: int, device: torch.device) -> Kept:
    """Where so many bytes go that are computed on a device."""
    if device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // SHARE:
        return "device"
    free = free_memory()
    if free is not None and size > free // SHARE:
        return "disk"
    return "device" if device.type == "cpu" else "cpu"


def free_memory() -> int | None:
    """Bytes of the CPU's memory that are free; None where the system does not say."""
    with suppress(OSError, ValueError, AttributeError):
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def in_file(values: Tensor) -> Tensor:
    """A copy whose memory is a file without a name: it goes with the tensor."""
    handle, name = tempfile.mkstemp(prefix="headscope-sums-")
    os.close(handle)
    try:
        mapped: Tensor = torch.from_file(name, shared=True, size=values.numel(), dtype=values.dtype)
    finally:
        os.unlink(name)
    return mapped.view(values.shape).copy_(values)
