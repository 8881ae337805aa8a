"""Several processes under torchrun: who am I, sums over all, one of us writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

T = TypeVar("T")
PATIENCE = timedelta(days=1)
"""How long processes wait for each other: one may parse or validate a whole corpus meanwhile."""


@dataclass(frozen=True)
class Processes:
    """This process's number and how many there are; a single process needs no torch.distributed."""

    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        """Whether this process writes and speaks."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """Sums over processes, in float64."""
        if self.world == 1:
            return values
        table = torch.tensor(values, dtype=torch.float64, device=_device())
        distributed.all_reduce(table)
        found: list[float] = table.tolist()
        return found

    def broadcast(self, value: T | None) -> T:
        """What the first process says."""
        if self.world == 1:
            assert value is not None
            return value
        box: list[Any] = [value]
        distributed.broadcast_object_list(box, device=_device())
        found: T = box[0]
        return found

    def all(self, value: T) -> list[T]:
        """What every process says."""
        if self.world == 1:
            return [value]
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, value)
        return found

    def gather(self, value: T) -> list[T]:
        """What every process says, told to the first one; to the others what they say themselves."""
        if self.world == 1:
            return [value]
        found: list[Any] | None = [None] * self.world if self.main else None
        distributed.gather_object(value, found)
        return [value] if found is None else found

    def wait(self) -> None:
        """Until all are here."""
        if self.world > 1:
            distributed.barrier()


def join_processes() -> Processes:
    """Take part in what torchrun started, if it did: nccl on GPUs, else gloo."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Processes()
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    return Processes(distributed.get_rank(), distributed.get_world_size())


def leave_processes() -> None:
    """End what `join_processes` began."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


@contextmanager
def process_group() -> Iterator[Processes]:
    """What torchrun started, within the block; within another such block that one's processes, which go on after it.

    Processes of one torchrun can meet only once: trainings one after the other belong into one such block.
    """
    begins = not (distributed.is_available() and distributed.is_initialized())
    try:
        yield join_processes()
    finally:
        if begins:
            leave_processes()


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if _nccl() else torch.device("cpu")


def _nccl() -> bool:
    return str(distributed.get_backend()) == "nccl"


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators that dropout draws from."""
    found = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    """Inverse of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
