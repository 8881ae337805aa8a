"""What differs between the CPU and an accelerator: how numbers get there, and which it has."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device. What goes there from the CPU is pinned where that is possible, and the host does not wait."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


@cache
def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64 (MPS does not)."""
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return False
    return True
