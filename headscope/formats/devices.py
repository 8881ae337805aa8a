"""Which device a model runs on."""

from __future__ import annotations

import torch

from headscope.errors import ConfigError


def pick_device(name: str) -> str:
    """`auto` is a GPU if there is one; ConfigError for a device that this machine lacks.

    Beside CUDA and MPS that is whatever torch calls the machine's accelerator (xpu, npu, …).
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if torch.accelerator.is_available() and (accelerator := torch.accelerator.current_accelerator()) is not None:
        available[accelerator.type] = True
    available["cpu"] = True
    if name == "auto":
        return next(device for device, present in available.items() if present)
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(["auto", "cpu", *(device for device in available if available[device] and device != "cpu")])
        raise ConfigError(f"device {name!r} is not available on this machine; available: {usable}")
    return name
