"""Processes of torchrun (rank, sums over all processes, gathering; rank 0 writes), and what their devices can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, distributed, nn

from headscope.errors import ConfigError, HeadscopeError

T = TypeVar("T")
PATIENCE = timedelta(days=1)
"""Time-out of collectives; one process may parse or validate a whole corpus while the others wait."""


@dataclass(frozen=True)
class Processes:
    """Rank and number of processes; a single process needs no torch.distributed."""

    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes files and prints."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over processes, in float64."""
        if self.world == 1:
            return values
        table = torch.tensor(values, dtype=torch.float64, device=_device())
        distributed.all_reduce(table)
        return table.tolist()

    def owns(self, number: int) -> bool:
        """Whether this process handles batch `number`; batches are dealt out in turn."""
        return number % self.world == self.rank

    def share(self, groups: Sequence[str]) -> set[str]:
        """The groups that this process works on."""
        return set(list(dict.fromkeys(groups))[self.rank :: self.world])

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make every gradient its sum over processes; None stays where no process has one."""
        if self.world == 1:
            return
        present = self.sum([float(parameter.grad is not None) for parameter in parameters])
        for parameter, processes in zip(parameters, present, strict=True):
            if processes:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                shared = gradient.to(_device()) if _nccl() else gradient
                distributed.all_reduce(shared)
                parameter.grad = shared.to(gradient.device)

    def on_main(self, prepare: Callable[[], T]) -> T:
        """The value that the first process prepares, in every process; its HeadscopeError is raised in all of them."""
        if self.world == 1:
            return prepare()
        result: T | HeadscopeError | None = None
        if self.main:
            try:
                result = prepare()
            except HeadscopeError as error:
                result = error
        value = self.broadcast(result)
        if isinstance(value, HeadscopeError):
            raise value
        return cast(T, value)

    def broadcast(self, value: T | None) -> T:
        """The value of rank 0."""
        if self.world == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        distributed.broadcast_object_list(box, device=_device())
        return box[0]

    def all(self, value: T) -> list[T]:
        """The values of all processes, by rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value)
        return values

    def gather(self, value: T) -> list[T]:
        """On rank 0 the values of all processes; on the others a list of their own."""
        if self.world == 1:
            return [value]
        values: list[Any] | None = [None] * self.world if self.main else None
        distributed.gather_object(value, values)
        return [value] if values is None else values

    def wait(self) -> None:
        """Wait for all processes."""
        if self.world > 1:
            distributed.barrier()


ALONE = Processes()
"""One process, without torchrun."""


@contextmanager
def process_group() -> Iterator[Processes]:
    """Within the block this process is part of torchrun's group, if there is one: nccl on GPUs, else gloo.

    Blocks within a block share the group. It can be joined only once per torchrun: several trainings in a row belong
    into one block.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield ALONE
        return
    if begins := not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield Processes(distributed.get_rank(), distributed.get_world_size())
    finally:
        if begins:
            distributed.destroy_process_group()


@contextmanager
def agree_once(prepare: Callable[[], T]) -> Iterator[tuple[T, Processes]]:
    """The value that the first process prepares, and all processes; within the block each process works by itself.

    `process_group` within it is a single process, so that no collective waits for hours. A HeadscopeError of the first
    process is raised in all of them.
    """
    with process_group() as processes:
        value = processes.on_main(prepare)
    alone = {"WORLD_SIZE": "1", "RANK": "0"} if processes.world > 1 else {}
    before = {name: os.environ[name] for name in alone if name in os.environ}
    os.environ.update(alone)
    try:
        yield value, processes
    finally:
        os.environ.update(before)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if _nccl() else torch.device("cpu")


def _nccl() -> bool:
    return str(distributed.get_backend()) == "nccl"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that dropout draws from."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


PIN_DEVICES = {"cuda"}
"""Devices that copy pinned memory while the host goes on."""


def pin(values: Tensor, device: torch.device) -> Tensor:
    """CPU values in pinned memory, for copies that the host does not wait for; unchanged for devices without it."""
    return values.contiguous().pin_memory() if device.type in PIN_DEVICES else values


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Values on a device; from the CPU they are copied without waiting, through pinned memory if possible."""
    if device.type == "cpu" or values.device.type != "cpu":
        return values.to(device)
    return pin(values, device).to(device, non_blocking=True)


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the CPU, copied at once for each device and dtype, so that the host waits once for each."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for number, tensor in enumerate(tensors):
        alike.setdefault((tensor.device, tensor.dtype), []).append(number)
    on_host = list(tensors)
    for (device, _), numbers in alike.items():
        if device.type != "cpu":
            together = torch.cat([tensors[number].flatten() for number in numbers]).cpu()
            parts = together.split([tensors[number].numel() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                on_host[number] = part.view(tensors[number].shape)
    return on_host


@cache
def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 where a device has no such numbers (MPS)."""
    try:
        return torch.zeros(1, dtype=torch.float64, device=device).dtype
    except (TypeError, RuntimeError):
        return torch.float32


def pick_device(name: str) -> str:
    """`auto` is a GPU if there is one; ConfigError for a device that this machine lacks.

    A GPU is whatever torch calls the machine's accelerator: cuda, mps, xpu, npu, …
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = ["cpu"] if accelerator is None else ["cpu", accelerator.type]
    if name == "auto":
        return available[-1]
    if name.partition(":")[0] not in available:
        usable = ", ".join(["auto", *available])
        raise ConfigError(f"device {name!r} is not available on this machine; available: {usable}")
    return name
