"""Independent pieces of work on several threads, where each piece is too small for torch to split it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")
MOST = 4
"""Workers, as each needs memory of its own."""


def spread(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """`work` of every item, in the order of the items; the last ones are begun first.

    torch's threads are divided among the workers, at most `MOST`: with one thread (`torch.set_num_threads`) this is a
    plain loop. Autograd is off within. An error of `work` is raised when all are done.
    """
    threads = torch.get_num_threads()
    workers = min(threads, len(items), MOST)

    @torch.no_grad()
    def quietly(item: T) -> R:
        return work(item)

    if workers < 2:
        return [quietly(item) for item in items]
    try:
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(threads // workers,)) as pool:
            begun = [pool.submit(quietly, item) for item in reversed(items)]
            return [one.result() for one in reversed(begun)]
    finally:
        torch.set_num_threads(threads)  # MKL's number is the process's, not the thread's
