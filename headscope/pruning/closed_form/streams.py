"""The residual stream that modules read from and add their output to, call after call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.discovery import eval_mode
from headscope.model.interface import watch_modules
from headscope.pruning.closed_form.moments import ContextTap, Place
from headscope.pruning.closed_form.output_projections import (
    AllRead,
    FeedForwardOutput,
    OutputProjection,
    StreamTap,
)


class ModuleCall(NamedTuple):
    """One call of a module: its inputs [n m], its output [n d], and the stream [n d] that this is added to.

    `stream` is None where that cannot be told (the output goes through a norm first).
    """

    place: Place
    inputs: Tensor
    output: Tensor
    stream: Tensor | None


def module_calls(checkpoint: Checkpoint, texts: Iterable[Batch]) -> Iterator[ModuleCall]:
    """Every call of an attention module over some batches, at real tokens, in float64."""
    for batch in texts:
        yield from CallReader(checkpoint).of(batch.to(checkpoint.device))


class CallReader(ContextTap):
    """Keeps every call of the attention modules in one batch; or of one `part`, when the pass ends with its last."""

    def __init__(self, checkpoint: Checkpoint, part: OutputProjection | FeedForwardOutput | None = None) -> None:
        is_block = isinstance(part, FeedForwardOutput)
        super().__init__(checkpoint, None if part is None else () if is_block else part.places)
        self.block = part.places[-1] if part is not None and is_block else None
        self.modules = set(self.owners.values())
        if part is not None:
            self.modules = {checkpoint.model.get_submodule(part.owner)}
        self.tap = StreamTap(calls=0 if part is None else 1 if is_block else len(part.places))
        self.called: list[tuple[Place, Tensor]] = []
        self.outputs: list[Tensor] = []

    def count(self, place: Place, contexts: Tensor, heads: int) -> None:
        """Keep the contexts of the place that the next output is of."""
        self.called.append((place, contexts))

    @contextmanager
    def observing(self) -> Iterator[None]:
        """Also copies outputs, before the tap follows what they are added to: it would follow the copies."""
        with ExitStack() as stack:
            if self.block is None:
                stack.enter_context(super().observing())
            for module in self.modules:
                if self.block is not None:
                    stack.callback(module.register_forward_pre_hook(self._block_input).remove)
            stack.enter_context(watch_modules(self.modules, lambda _, __, output: self.outputs.append(output.clone())))
            stack.enter_context(self.tap.observing(self.modules))
            yield

    def _block_input(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert self.block is not None
        self.called.append((self.block, self.rows(self.block, inputs[0])))

    def of(self, batch: Batch) -> list[ModuleCall]:
        """The calls of one batch, in their order."""
        self.called, self.outputs = [], []
        with self.observing(), eval_mode(self.checkpoint.model), suppress(AllRead):
            self.read(batch)
        self.counting = False
        streams = self.tap.streams()
        if len(self.called) != len(streams):  # W_O at work outside attention, or in parts
            nothing = torch.empty(0, 0)
            return [ModuleCall(place, inputs, nothing, None) for place, inputs in self.called]
        return [
            ModuleCall(place, inputs, self.rows(place, output), None if stream is None else self.rows(place, stream))
            for (place, inputs), output, stream in zip(self.called, self.outputs, streams, strict=True)
        ]
