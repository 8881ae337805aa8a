"""Simulated accelerators: tensors on devices of their own that hold CPU tensors, for tests without a GPU.

`with simulate_devices():` makes `sim:0` and `sim:1` usable. A tensor there wraps one of the CPU, on which every
operation of torch's dispatcher runs. As on CUDA, operations that mix devices raise, and so does a
generator of the CPU for random numbers there. Counted are *kernels* (operations that are neither views nor
allocations), host *synchronisations* (reading numbers, copies to the CPU, shapes that depend on data) and *uploads*
that make the host wait. What a real device does in its own way (its rounding, its memory, its time) is not shown.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

from headscope import distributed

aten = torch.ops.aten
ROOT = f"{Path(__file__).resolve().parents[2]}{os.sep}"
DEVICE = os.environ.get("HEADSCOPE_TEST_DEVICE")
"""A device of this machine that the contract on devices runs on, instead of simulated ones."""
NAME, DEVICES = "sim", 2
FIRST, SECOND = (f"{NAME}:{number}" for number in range(DEVICES))
READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique", "unique_", "bincount", "is_nonzero")
NO_KERNELS = ("_unsafe_view", "detach", "alias", "lift_fresh", "empty", "new_empty", "_to_copy", "_reshape_alias")
CPU = torch.device("cpu")


@dataclass
class Counts:
    """Operations on the devices, and the lines of headscope that synchronise."""

    kernels: int = 0
    syncs: int = 0
    uploads: int = 0
    names: Counter[str] = field(default_factory=Counter)
    call_sites: Counter[str] = field(default_factory=Counter)
    kernel_call_sites: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """From zero."""
        vars(self).update(vars(Counts()))

    def sync(self) -> None:
        """Another host synchronisation."""
        self.syncs += 1
        self.call_sites[_call_site()] += 1


@dataclass
class _State:
    """State set by `simulate_devices`."""

    counts: Counts = field(default_factory=Counts)
    usable: bool = False
    float64: bool = True
    count_lines: bool = False


STATE = _State()


def _call_site() -> str:
    """The innermost line of this repository that called, and the innermost of all but torch's."""
    innermost, frame = "", cast(Any, sys._getframe(2))
    while frame is not None:
        name = frame.f_code.co_filename
        if name != __file__ and f"{os.sep}torch{os.sep}" not in name:
            line = f"{name.partition('site-packages' + os.sep)[2] or name.removeprefix(ROOT)}:{frame.f_lineno}"
            innermost = innermost or line
            if name.startswith(ROOT):
                return line if line == innermost else f"{line} ({innermost})"
        frame = frame.f_back
    return innermost


class SimTensor(torch.Tensor):
    """A tensor `raw` of the CPU, which says that it is somewhere else."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> SimTensor:
        wrapper: SimTensor = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype, device=device
        )
        wrapper.raw = raw
        return wrapper

    def __init__(self, raw: Tensor, device: torch.device) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _run(op, args, kwargs or {})

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the tensor inside: views of one tensor share it, as on a device."""
        return self.raw.untyped_storage()

    __torch_function__ = cast(Any, torch._C._disabled_torch_function_impl)


def _with_index(device: torch.device) -> torch.device:
    return torch.device(NAME, device.index or 0) if device.type == NAME else device


def _run(op: Any, args: Any, kwargs: Any) -> Any:
    """An operation on what tensors hold, with the checks of a device."""
    flat = list(_flat((*args, *kwargs.values())))
    sims = [entry for entry in flat if isinstance(entry, SimTensor)]
    requested_device = kwargs.get("device")
    destination = None if requested_device is None else _with_index(torch.device(requested_device))
    if not sims and (destination is None or destination.type != NAME):
        return op(*args, **kwargs)
    name = str(op).removeprefix("aten.")
    _check(op, name, args, flat, sims)
    _count(op, name, args, kwargs, flat, sims, destination)
    raw_args, raw_kwargs = map(_inside, args), {key: _inside(value) for key, value in kwargs.items()}
    if "pin_memory" in raw_kwargs:
        raw_kwargs["pin_memory"] = False
    out = op(*raw_args, **raw_kwargs)
    if op is aten.copy_.default:
        return args[0]
    if op is aten._local_scalar_dense.default or destination == CPU:
        return out
    device = destination if destination is not None else sims[0].device
    wrappers = {id(sim.raw): sim for sim in sims}
    return _outside(out, device, wrappers)


def _flat(entries: Any) -> Iterator[Any]:
    """The entries of lists, and of lists in them."""
    for entry in entries:
        if isinstance(entry, (list, tuple)):
            yield from _flat(entry)
        else:
            yield entry


def _inside(entry: Any) -> Any:
    if isinstance(entry, SimTensor):
        return entry.raw
    if isinstance(entry, (list, tuple)):
        return [_inside(part) for part in entry]
    return CPU if isinstance(entry, torch.device) and entry.type == NAME else entry


def _outside(entry: Any, device: torch.device, wrappers: dict[int, SimTensor]) -> Any:
    if isinstance(entry, (list, tuple)):
        return type(entry)(_outside(part, device, wrappers) for part in entry)
    if not isinstance(entry, Tensor):
        return entry
    if entry.dtype is torch.float64 and not STATE.float64:
        raise TypeError("Cannot convert a tensor to float64: the device has none")
    return wrappers[id(entry)] if id(entry) in wrappers else SimTensor(entry, device)


def _check(op: Any, name: str, args: Any, flat: list[Any], sims: list[SimTensor]) -> None:
    """RuntimeError where CUDA would raise one."""
    generator = [entry for entry in flat if isinstance(entry, torch.Generator)]
    if generator:
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu': {name}")
    if op in (aten.copy_.default, aten._to_copy.default):
        return
    devices = {sim.device for sim in sims}
    if len(devices) > 1 and not all(sim.dim() == 0 for sim in sims if sim.device != sims[0].device):
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got {sorted(map(str, devices))}")
    plain = [entry for entry in flat if isinstance(entry, Tensor) and not isinstance(entry, SimTensor) and entry.dim()]
    takes = name.startswith(("index.", "index_put", "_index_put", "_unsafe_index")) and isinstance(args[0], SimTensor)
    if sims and plain and not takes:
        raise RuntimeError(f"Expected all tensors to be on the same device: {name} got {NAME} and cpu")


def _count(
    op: Any, name: str, args: Any, kwargs: Any, flat: list[Any], sims: list[SimTensor], destination: torch.device | None
) -> None:
    counts = STATE.counts
    if op is aten.copy_.default and isinstance(args[0], SimTensor) != isinstance(args[1], SimTensor):
        counts.sync() if sims[0] is args[1] else _count_upload(args[1], len(args) > 2 and args[2])
        return
    if op is aten._to_copy.default and destination is not None:
        if destination == CPU:
            counts.sync()
        elif not sims:
            _count_upload(args[0], kwargs.get("non_blocking", False))
        else:
            counts.kernels += 1
        return
    if name.startswith(READS) or (name.startswith(("index.", "index_put")) and _by_mask(name, args)):
        counts.sync()
    if not (op.is_view or name.startswith(NO_KERNELS)) or op is aten._to_copy.default:
        counts.kernels += 1
        counts.names[name] += 1
        if STATE.count_lines:
            counts.kernel_call_sites[f"{_call_site()} {name}"] += 1


def _count_upload(values: Tensor, non_blocking: bool) -> None:
    if not non_blocking:
        STATE.counts.uploads += 1
        STATE.counts.call_sites[f"upload {_call_site()}"] += 1


def _by_mask(name: str, args: Any) -> bool:
    """True for an index by a mask, whose set entries the host must count; writing one number needs no count."""
    masks = any(isinstance(index, Tensor) and index.dtype is torch.bool for index in args[1])
    return masks and not (name.startswith("index_put") and args[2].numel() == 1)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Functions of torch that bypass the dispatcher: `torch.tensor(…, device=…)`, `tolist`, `numpy`."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        device = options.get("device")
        if function in (torch.tensor, torch.as_tensor) and device is not None and torch.device(device).type == NAME:
            del options["device"]
            return function(*args, **options).to(device)
        if isinstance(args[0] if args else None, SimTensor):
            if function is torch.Tensor.new_tensor:
                return torch.tensor(args[1], **{"dtype": args[0].dtype, **options}).to(args[0].device)
            if function is torch.Tensor.tolist:
                STATE.counts.sync()
                return args[0].raw.tolist()
            if function is torch.Tensor.numpy:
                raise TypeError(f"can't convert {NAME} device type tensor to numpy")
        return function(*args, **options)


@cache
def register() -> None:
    """Make the devices known, which must be before the first backward pass of the process; nobody sees them yet."""

    class Hook(backend_registration._DummyPrivateUse1Hook):
        def is_available(self) -> bool:
            return STATE.usable

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return STATE.usable

        def device_count(self) -> int:
            return DEVICES

        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16]

    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module(), hook=Hook())
    distributed.PIN_DEVICES.add(NAME)


@contextmanager
def _as_it_is() -> Iterator[None]:
    yield


def _without_inference(mode: bool = True) -> Any:
    return torch.no_grad() if mode else _as_it_is()  # wrappers cannot be made in inference mode


def _pin_memory(values: Tensor) -> Tensor:
    """As `Tensor.pin_memory`: with the strides that it has, which no expanded tensor can be copied to."""
    return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).copy_(values)


@contextmanager
def simulate_devices(*, float64: bool = True, count_lines: bool = False) -> Iterator[Counts]:
    """Within the block `sim:0` and `sim:1` can be used; without `float64` they have no such numbers (as MPS).

    With `count_lines` the lines that start kernels are counted, too.
    """
    register()
    before = vars(STATE).copy()
    vars(STATE).update(counts=Counts(), usable=True, float64=float64, count_lines=count_lines)
    try:
        with ExitStack() as stack:
            stack.enter_context(patch.object(torch, "inference_mode", _without_inference))
            stack.enter_context(patch.object(torch.Tensor, "pin_memory", _pin_memory))
            stack.enter_context(_Dispatch())  # type: ignore[no-untyped-call]
            stack.enter_context(_Functions())
            yield STATE.counts
    finally:
        vars(STATE).update(before)
