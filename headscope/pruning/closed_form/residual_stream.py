"""What the output of an attention module is added to, the residual stream at that point, for any model.

It is read off the tensor operations, so no architecture is known by name. An output y that is added to other values
before anything else reads it gives these values: in post-norm and pre-norm blocks the stream, in parallel blocks the
stream and the output of the feed-forward layer. Where y is first multiplied by a constant c, they are divided by c.
Where something else reads y first (a norm of y, say) nothing is given: no change of y alone could make up for a change
of the stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN = torch.ops.aten
ADDITIONS = {_ATEN.add.Tensor, _ATEN.add_.Tensor}
PRODUCTS = {_ATEN.mul.Tensor, _ATEN.mul.Scalar, _ATEN.mul_.Tensor, _ATEN.mul_.Scalar}
COPIES = {_ATEN.clone.default, _ATEN._to_copy.default}


@dataclass(eq=False)
class _Sum:
    """An output y on its way through the model: `value` holds c · y + `stream`, where `scale` is c."""

    value: Tensor
    stream: Tensor | None = None
    scale: float = 1.0
    read: bool = False

    def is_in(self, argument: Any) -> bool:
        """Whether an argument of an operation has its memory."""
        return isinstance(argument, Tensor) and _memory(argument) == _memory(self.value)

    def follow(self, operation: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> bool:
        """Take in an operation that reads the value; whether its result is what is to be followed from now on."""
        others = [argument for argument in arguments if not self.is_in(argument)]
        if operation in COPIES:
            return True
        if len(arguments) != 2 or len(others) != 1 or options:
            return False
        (other,) = others
        if operation in PRODUCTS and self.stream is None and (factor := _number(other)):
            self.scale *= factor
            return True
        if operation in ADDITIONS and isinstance(other, Tensor) and other.numel() == self.value.numel():
            self.stream = other.clone() if self.stream is None else self.stream + other
            return True
        return False


class AllRead(Exception):
    """Ends a pass: every output that was to be followed has been read."""


class StreamTap(TorchDispatchMode):
    """Follows the outputs of some modules while a model computes; after so many `calls` of them it ends the pass."""

    def __init__(self, *, calls: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sums: list[_Sum] = []
        self.calls = calls

    @contextmanager
    def observing(self, modules: Iterable[nn.Module]) -> Iterator[None]:
        """Entered around a pass."""
        hooks = [module.register_forward_hook(self._begin) for module in set(modules)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def streams(self) -> list[Tensor | None]:
        """What the outputs of all calls were added to [b t d], in the order of calls; then the tap is empty."""
        sums, self.sums = self.sums, []
        return [None if call.stream is None else call.stream / call.scale for call in sums]

    def _begin(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.sums.append(_Sum(output))

    def __torch_dispatch__(
        self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), options: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, and look whether it reads an output that is followed."""
        options = options or {}
        readers = [
            call
            for call in self.sums
            if not call.read and any(call.is_in(part) for part in _leaves(arguments, options))
        ]
        followed = [call for call in readers if call.follow(operation, arguments, options)]
        result = operation(*arguments, **options)
        for call in readers:
            if call in followed:
                call.value = result
            elif not call.is_in(result):
                call.read = True
        if readers and len(self.sums) == self.calls and all(call.read for call in self.sums):
            raise AllRead
        return result


def _leaves(arguments: tuple[Any, ...], options: dict[str, Any]) -> Iterator[Any]:
    for argument in (*arguments, *options.values()):
        yield from argument if isinstance(argument, (list, tuple)) else (argument,)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _number(value: Any) -> float | None:
    """A constant factor, given as a number or a tensor of one; else None."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) else None
