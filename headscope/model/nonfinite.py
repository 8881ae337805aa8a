"""NaN and infinite numbers: whether a tensor, file or model has any, and which module is the first to output one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from contextvars import ContextVar
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError, NumericalError, flag, shortlist
from headscope.model.interface import tensors_in, watch_modules
from headscope.model.stored_weights import in_place, is_offloaded

WIDER = {torch.float16: "float32 or bfloat16", torch.bfloat16: "float32"}


def is_finite(values: Tensor, *, masked: bool = False) -> bool:
    """Whether a tensor of any type and shape has no NaN and no infinite number; with `masked` -inf is allowed.

    One pass over the tensor without allocation: its minimum and maximum are NaN if any element is.
    """
    if "torchao" in type(values).__module__:  # a quantised tensor, which has few operations of its own
        values = values.detach().dequantize()
    with torch._C.DisableTorchFunction():  # no torch function mode may see these operations
        if values.is_complex():
            values = torch.view_as_real(values)
        if not values.is_floating_point() or values.is_meta or not values.numel():
            return True
        if values.element_size() == 1:  # 8-bit floats cannot be compared
            values = values.float()
        bounds = torch.stack(values.detach().aminmax())
    low, high = bounds.tolist()
    return high < torch.inf and (low > -torch.inf or (masked and low == -torch.inf))


def refuse_damaged_file(path: object, tensors: Mapping[str, Tensor]) -> None:
    """CheckpointError naming the tensors of a file that hold NaN or infinite numbers."""
    _refuse(path, [name for name, values in tensors.items() if not is_finite(values)], "the file is damaged")


def refuse_damaged_model(path: object, model: nn.Module) -> None:
    """CheckpointError naming the parameters and stored buffers of a model that hold NaN or infinite numbers.

    -inf is allowed in buffers, which may be masks. A weight that is finite in the file but not in the model was too
    large for the type that the model is opened in.
    """
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, values in model.state_dict(keep_vars=True).items():
        if isinstance(values, Tensor):
            tensors.setdefault(id(values), (name, values))
    wrong = [
        name for name, values in tensors.values() if not is_finite(values, masked=not isinstance(values, nn.Parameter))
    ]
    for prefix, module in model.named_modules():
        if is_offloaded(module):  # one module at a time
            with in_place(module):
                parameters = module.named_parameters(recurse=False)
                wrong += [f"{prefix}.{name}" for name, values in parameters if not is_finite(values)]
    types = {values.dtype for _, values in tensors.values()} & WIDER.keys()
    hint = f"the file is damaged, or needs {flag.dtype} {WIDER[types.pop()]}" if types else "the file is damaged"
    _refuse(path, wrong, hint)


def _refuse(path: object, wrong: Collection[str], hint: str) -> None:
    if wrong:
        names = shortlist([name[:100] for name in wrong])
        raise CheckpointError(f"{path}: NaN or infinite numbers in {names}; {hint}")


EVERY = 16  # batches between two checks on a device, each of which waits for it; on a CPU checks are immediate


class DeferredChecks:
    """Checks of tensors for NaN and infinity that wait on the device: extreme values, each with a function to complain.

    On a CPU they are made at once.
    """

    def __init__(self, device: torch.device) -> None:
        self.immediate = device.type == "cpu"
        self.waiting: list[tuple[Tensor, Callable[[], object]]] = []
        self.batches = 0

    def add(self, values: Tensor, complain: Callable[[], object], *, masked: bool = False) -> None:
        """Add values that should be finite; otherwise `complain` is called. With `masked` they may be -inf."""
        if values.is_floating_point() and values.numel():
            extremes = (values.detach().amax(),) if masked else values.detach().aminmax()
            self.waiting += [(extreme, complain) for extreme in extremes]
        if self.immediate:
            self.read()

    def batch_done(self) -> None:
        """Count a batch, and read the waiting values every `EVERY` batches."""
        self.batches += 1
        if self.batches % EVERY == 0:
            self.read()

    def read(self) -> None:
        """Read all waiting values, with one wait for each device, and complain about those that are not finite."""
        waiting, self.waiting = self.waiting, []
        by_device: dict[torch.device, list[int]] = {}
        for number, (extreme, _) in enumerate(waiting):
            by_device.setdefault(extreme.device, []).append(number)
        wrong: list[int] = []
        for numbers in by_device.values():
            read = torch.stack([waiting[number][0].float() for number in numbers]).tolist()
            wrong += [number for number, value in zip(numbers, read, strict=True) if not isfinite(value)]
        for number in sorted(wrong):
            waiting[number][1]()


DEFERRED_CHECKS: ContextVar[DeferredChecks | None] = ContextVar("headscope_deferred_checks", default=None)
"""The deferred checks of model outputs (`headscope.model.forward`); None: they are checked at once."""


def first_non_finite(
    model: nn.Module, run: Callable[[], object], *, select_tokens: Callable[[Tensor], Tensor] = lambda values: values
) -> str | None:
    """The first module with a non-finite output while `run` makes a forward pass of `model`; None if there is none.

    The output of every module is checked, so this is for a pass that is known to fail. `select_tokens` selects the part
    of a tensor to check.
    """
    names, locations = {part: name for name, part in model.named_modules()}, list[str]()

    def check(module: nn.Module, _: Any, output: Any) -> None:
        owns = next(module.parameters(recurse=False), None) is not None  # other modules may make masks of -inf
        finite = (is_finite(select_tokens(tensor), masked=not owns) for tensor in tensors_in(output))
        if not locations and not all(finite):
            locations.append(names[module] or "the model")

    with watch_modules(model.modules(), check), suppress(NumericalError), torch.no_grad():
        run()
    return next(iter(locations), None)
