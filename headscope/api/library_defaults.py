"""What torch and numpy do by default, whatever the caller's own code has switched on for itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch


@contextmanager
def library_defaults() -> Iterator[None]:
    """Within the block gradients can be had, and nothing is cast or placed that does not say so itself.

    A caller may be within `torch.no_grad()`, `torch.inference_mode()`, `torch.autocast(…)` or `torch.device(…)`, or
    have another default type: measures would then be rounded, lack gradients, or fail between tensors of two types.
    With `numpy.seterr(all="raise")` they would fail where a number is so small that it is 0.
    """
    kind = torch.get_default_dtype()
    with ExitStack() as stack:
        stack.enter_context(np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        if kind != torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, kind)
        yield


@contextmanager
def kept_random_state() -> Iterator[None]:
    """After the block torch draws the random numbers that it would have drawn without it, on every device."""
    started = [kind for kind in (torch.cuda, torch.xpu) if kind.is_available() and kind.is_initialized()]
    states = [(kind.set_rng_state_all, kind.get_rng_state_all()) for kind in started]
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    states.append((torch.set_rng_state, torch.get_rng_state()))
    try:
        yield
    finally:
        for restore, state in states:
            restore(state)
