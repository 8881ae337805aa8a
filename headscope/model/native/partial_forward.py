"""Start a stack at a later layer, with the inputs of that layer from an earlier pass over the same batch.

For passes that differ in a few heads only, such as each head masked in turn. Entered with `with` and kept in a context
variable, so nothing outlives the block; not used in incremental decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class PartialForward:
    """Inputs of the layers of each stack, recorded in a first pass over a batch."""

    inputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    first: Mapping[nn.Module, int] = field(default_factory=dict)
    recording: bool = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the block the inputs of all layers are recorded."""
        self.inputs.clear()
        with self._entered({}, recording=True):
            yield

    @contextmanager
    def starting(self, first: Mapping[nn.Module, int]) -> Iterator[None]:
        """Within the block a recorded stack starts at layer `first[stack]`, others at 0."""
        with self._entered({stack: layer for stack, layer in first.items() if stack in self.inputs}, recording=False):
            yield

    @contextmanager
    def _entered(self, first: Mapping[nn.Module, int], *, recording: bool) -> Iterator[None]:
        self.first, self.recording = first, recording
        token = _REUSED.set(self)
        try:
            yield
        finally:
            _REUSED.reset(token)

    def enter(self, stack: nn.Module, x: Tensor) -> tuple[Tensor, int]:
        """Input and number of the first layer that a stack computes, given its embedded input x."""
        first = self.first.get(stack, 0)
        return (self.inputs[stack][first] if first else x), first

    def note(self, stack: nn.Module, number: int, x: Tensor) -> None:
        """Record x, the input of layer `number`."""
        if self.recording:
            recorded = self.inputs.setdefault(stack, [])
            del recorded[number:]
            recorded.append(x)


_REUSED: ContextVar[PartialForward | None] = ContextVar("headscope_reuse", default=None)


def reused_outputs() -> PartialForward | None:
    """The `PartialForward` of the innermost block, None outside."""
    return _REUSED.get()
