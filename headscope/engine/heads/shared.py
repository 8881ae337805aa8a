"""Tensors that depend on a batch but not on the layer: made once for all layers that see the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class SharedTensors:
    """What is shared while one batch is on its way."""

    entries: dict[str, Any] = field(default_factory=dict)

    def get(self, name: str, owner: object, make: Callable[[], T]) -> T:
        """What `make` made when it was first asked for under this name with this very owner."""
        key = f"{name}/{id(owner)}"
        if key not in self.entries:
            self.entries[key] = (make(), owner)  # holding the owner keeps its id from being used again
        value: T = self.entries[key][0]
        return value
