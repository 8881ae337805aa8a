"""Modules built for their shapes alone: no memory, no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_DRAWS = (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_)


class _NoDraws(TorchFunctionMode):
    """Leaves tensors as they are that random numbers would be drawn into.

    Drawing into a meta tensor does nothing either, but torch imports its compiler for it, which takes a second.
    """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return kwargs["tensor"] if function in _DRAWS else function(*args, **(kwargs or {}))


@contextmanager
def shapes_only() -> Iterator[None]:
    """Within the block modules are built on the meta device."""
    with torch.device("meta"), _NoDraws():
        yield
