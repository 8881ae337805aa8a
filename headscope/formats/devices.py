"""Which device a model runs on."""

from __future__ import annotations

import torch

from headscope.errors import ConfigError


def pick_device(name: str) -> str:
    """`auto` is a GPU if there is one; ConfigError for a device that this machine lacks."""
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(device for device in ("cuda", "mps", "cpu") if available[device])
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(["auto", *(device for device, present in available.items() if present)])
        raise ConfigError(f"device {name!r} is not available on this machine; available: {usable}")
    return name
