"""Number of threads of a pass: torch's where matrix products are large, one where they are small.

torch splits every operation among its threads and waits for the last of them. Where an operation takes a fraction of a
millisecond the wait costs more than the second thread saves as soon as another process keeps a core busy: a thread that
is not scheduled delays the others by a whole time slice, at each operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn

from headscope.model.process_settings import may_change_process

T = TypeVar("T")
R = TypeVar("R")
MOST = 4
"""Workers of `parallel_map`, as each needs memory of its own."""
LARGE = 2**26
"""Multiply-adds of a product that is worth several threads: one to two milliseconds of one core."""
LEAST_ROWS = 16
"""A product of fewer rows takes as long as one of 16: the time to read the matrix."""

_allowed: ContextVar[int | None] = ContextVar("allowed threads", default=None)
_matrix_sizes: WeakKeyDictionary[nn.Module, float] = WeakKeyDictionary()


def allowed() -> int:
    """The most threads that may be used: torch's number (`torch.set_num_threads`, OMP_NUM_THREADS).

    Within `threads_for_pass` this is the number from before it.
    """
    return _allowed.get() or torch.get_num_threads()


def product_size(model: nn.Module, positions: int) -> float:
    """Mean number of multiply-adds of the matrix products in a pass of `positions` rows.

    The matrices of a model are counted once.
    """
    if model not in _matrix_sizes:
        sizes = [
            parameter.shape[-2] * parameter.shape[-1]
            for module in model.modules()
            if not isinstance(module, nn.Embedding)
            for parameter in module.parameters(recurse=False)
            if parameter.ndim > 1
        ]
        _matrix_sizes[model] = sum(sizes) / max(len(sizes), 1)
    return max(positions, LEAST_ROWS) * _matrix_sizes[model]


def threads_for(multiply_adds: float, maximum: int) -> int:
    """Threads for products of that size: `maximum` from `LARGE` on, else one."""
    return maximum if multiply_adds >= LARGE else 1


@contextmanager
def threads_for_pass(model: nn.Module, positions: int) -> Iterator[None]:
    """Within the block torch has the number of threads for passes of `positions` rows; restored afterwards.

    Never more than `allowed`. `positions` counts the rows of a product: sentences times their padded length, or
    hypotheses in a step of beam search. Applies only in the process of a command
    (`headscope.model.process_settings`), to a model on the CPU.
    """
    first = next(model.parameters(), None)
    if not may_change_process() or first is None or first.device.type != "cpu":
        yield
        return
    before, maximum = torch.get_num_threads(), allowed()
    entered = _allowed.set(maximum)
    _set_threads(threads_for(product_size(model, positions), maximum))
    try:
        yield
    finally:
        _allowed.reset(entered)
        _set_threads(before)


def _set_threads(number: int) -> None:
    if number != torch.get_num_threads():
        torch.set_num_threads(number)


def parallel_map(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`work` of every item, in the order of the items; the last ones are begun first.

    For independent tasks that are each too small for torch to parallelise. The `allowed` threads are divided among the
    workers, at most `MOST`: with one thread this is a plain loop. The caller's number of threads is the same
    before, within and after. Autograd is off in `work`; an error of `work` is raised when all are done.
    """
    before, threads = torch.get_num_threads(), allowed()
    workers = min(threads, len(items), MOST)

    @torch.no_grad()
    def without_gradients(item: T) -> R:
        return work(item)

    if workers < 2:
        return [without_gradients(item) for item in items]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            futures = [pool.submit(without_gradients, item) for item in reversed(items)]
            try:
                return [future.result() for future in reversed(futures)]
            except KeyboardInterrupt:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        torch.set_num_threads(before)  # MKL's number is the process's, not the thread's
