"""The residual stream that every attention module reads from and adds its output to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.pruning.closed_form.moments import ContextTap, Place
from headscope.pruning.closed_form.output_projections import StreamTap


class ModuleCall(NamedTuple):
    """One call of an attention module: contexts [n m], its output [n d], and the stream [n d] that this is added to.

    `stream` is None where that cannot be told (the output goes through a norm first).
    """

    place: Place
    contexts: Tensor
    output: Tensor
    stream: Tensor | None


def module_calls(checkpoint: Checkpoint, texts: Iterable[Batch]) -> Iterator[ModuleCall]:
    """Every call of an attention module over some batches, at real tokens, in float64."""
    for batch in texts:
        yield from _Reader(checkpoint).of(batch.to(checkpoint.device))


class _Reader(ContextTap):
    """Keeps the contexts and outputs of every call in one batch."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.tap = StreamTap()
        self.called: list[tuple[Place, Tensor]] = []
        self.outputs: list[Tensor] = []

    def count(self, place: Place, contexts: Tensor, heads: int) -> None:
        """Keep the contexts of the place that the next output is of."""
        self.called.append((place, contexts))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Also copies outputs, before the tap follows what they are added to: it would follow the copies."""
        modules = set(self.owners.values())
        with super().observing(), ExitStack() as stack:
            for module in modules:
                stack.callback(module.register_forward_hook(self._output).remove)
            stack.enter_context(self.tap.observing(modules))
            yield

    def _output(self, _: nn.Module, __: object, output: Tensor) -> None:
        self.outputs.append(output.clone())

    def of(self, batch: Batch) -> list[ModuleCall]:
        """The calls of one batch, in their order."""
        model = self.checkpoint.model
        with self.observing(), eval_mode(model):
            self.read(batch)
        streams = self.tap.streams()
        if len(self.called) != len(streams):  # W_O at work outside attention, or in parts
            nothing = torch.empty(0, 0)
            return [ModuleCall(place, contexts, nothing, None) for place, contexts in self.called]
        return [
            ModuleCall(place, contexts, self.rows(place, output), None if stream is None else self.rows(place, stream))
            for (place, contexts), output, stream in zip(self.called, self.outputs, streams, strict=True)
        ]
