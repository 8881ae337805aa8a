"""Run a stack of layers again from one layer on: what is below a change gives what it gave before.

For passes over the same batch that differ in a few heads only, such as each head off in turn. Entered with
`with` and kept in a context variable, so nothing outlives the block; incremental decoding takes no part in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass
class PartialForward:
    """Inputs of the layers of each stack, as a first pass over a batch left them."""

    inputs: dict[nn.Module, list[Tensor]] = field(default_factory=dict)
    first: Mapping[nn.Module, int] = field(default_factory=dict)
    recording: bool = False

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the block stacks run as ever, and the inputs of their layers are kept."""
        self.inputs.clear()
        with self._entered({}, recording=True):
            yield

    @contextmanager
    def starting(self, first: Mapping[nn.Module, int]) -> Iterator[None]:
        """Within the block a stack that was recorded starts at the layer that `first` says, others at 0."""
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
        """What a stack starts with, and at which layer."""
        first = self.first.get(stack, 0)
        return (self.inputs[stack][first] if first else x), first

    def note(self, stack: nn.Module, number: int, x: Tensor) -> None:
        """A layer is about to run on x."""
        if self.recording:
            kept = self.inputs.setdefault(stack, [])
            del kept[number:]
            kept.append(x)


_REUSED: ContextVar[PartialForward | None] = ContextVar("headscope_reuse", default=None)


def reused_outputs() -> PartialForward | None:
    """What the innermost block reuses, if there is one."""
    return _REUSED.get()
