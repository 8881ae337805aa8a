"""How many token positions a batch may have on an accelerator: what one needs is measured, once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from headscope.data.batching import DEFAULT_TOKENS
from headscope.data.encoded import Batch

MOST_TOKENS = 2**17
"""Positions beyond which a batch gains nothing."""
SHARE = 0.6
"""Of the memory that is free; texts that come later may need more than those measured."""
ASKED = ("mem_get_info", "memory_allocated", "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats")


class Memory(Protocol):
    """The memory of a device."""

    def free(self) -> int:
        """Bytes that are free for new tensors."""
        ...

    def peak(self, work: Callable[[], object]) -> int:
        """Bytes of all tensors that were there at once while some work was done, beyond those of before."""
        ...


class DeviceMemory:
    """What torch knows of an accelerator's memory: of CUDA's, and of devices with the same functions."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.of = device, getattr(torch, device.type)

    def free(self) -> int:
        """What nobody has, and what torch keeps for new tensors."""
        unused: int = self.of.memory_reserved(self.device) - self.of.memory_allocated(self.device)
        return int(self.of.mem_get_info(self.device)[0]) + unused

    def peak(self, work: Callable[[], object]) -> int:
        """See `Memory`."""
        before: int = self.of.memory_allocated(self.device)
        self.of.reset_peak_memory_stats(self.device)
        work()
        return int(self.of.max_memory_allocated(self.device)) - before


def memory_of(device: torch.device) -> Memory | None:
    """The memory of an accelerator; None where torch cannot tell."""
    of: Any = getattr(torch, device.type, None)
    return DeviceMemory(device) if device.type != "cpu" and all(hasattr(of, name) for name in ASKED) else None


def fitting_tokens(batch: Batch, run: Callable[[Batch], object], memory: Memory, *, limit: int) -> int:
    """The positions of a batch for which memory suffices, a multiple of 2,048, by what `run` needs for a given one.

    `limit` is the longest sentence that may come: attention needs more for each position of a longer one.
    """
    once, twice = (batch.rows(torch.arange(len(batch.indices)).repeat(times)) for times in (1, 2))
    try:
        run(once)  # what is made once, and stays
        peaks = [memory.peak(partial(run, part)) for part in (once, twice)]
    except torch.OutOfMemoryError:
        return DEFAULT_TOKENS
    each = max(1.0, (peaks[1] - peaks[0]) / batch.positions)
    fixed = max(0.0, peaks[0] - each * batch.positions)
    fitting = (SHARE * memory.free() - fixed) / (each * max(1.0, limit / batch.longest))
    return max(DEFAULT_TOKENS, min(int(fitting), MOST_TOKENS) // DEFAULT_TOKENS * DEFAULT_TOKENS)
