"""Who does which cells: this process, several that it starts, or those that torchrun started."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import wait
from typing import TypeVar

import torch

from headscope.distributed import Processes, join_processes, leave_processes
from headscope.errors import ConfigError, HeadscopeError, TrainingError
from headscope.model.process_settings import process_settings
from headscope.progress import Progress, no_progress
from headscope.pruning.sweep.bench import Bench, is_ranking
from headscope.pruning.sweep.cell import run_cell
from headscope.pruning.sweep.config import Cell, SweepConfig
from headscope.pruning.sweep.files import write_cell

T = TypeVar("T")
S = TypeVar("S")
Task = Cell | tuple[str, int]
POLL = 0.5  # seconds


class Launch:
    """This process among those of torchrun, if it started any; used with `with`.

    The processes meet once, then each does its cells without the others, for hours if need be: nothing waits in
    torch.distributed meanwhile, and what trains within a cell sees one process alone.
    """

    def __init__(self) -> None:
        self.processes = Processes()
        self._before: dict[str, str] = {}

    def __enter__(self) -> Launch:
        self.processes = join_processes()
        return self

    def __exit__(self, *_: object) -> None:
        leave_processes()
        os.environ.update(self._before)

    @property
    def main(self) -> bool:
        """Whether this process makes the tables."""
        return self.processes.main

    def meet(self, prepare: Callable[[], T], tell: Callable[[T], S], others: Callable[[S], T]) -> tuple[T, S]:
        """What the first process prepares and tells the others, who make their own of that.

        Its HeadscopeError becomes everybody's.
        """
        if self.processes.world == 1:
            found = prepare()
            return found, tell(found)
        problem, said, mine = "", None, None
        if self.main:
            try:
                mine = prepare()
                said = tell(mine)
            except HeadscopeError as error:
                problem = str(error)
        problem, said = self.processes.broadcast((problem, said) if self.main else None)
        leave_processes()
        alone = {"WORLD_SIZE": "1", "RANK": "0"}
        self._before = {name: os.environ[name] for name in alone if name in os.environ}
        os.environ.update(alone)
        if problem:
            raise ConfigError(problem)
        assert said is not None
        return (others(said) if mine is None else mine), said

    def share(self, cells: Sequence[Cell]) -> list[Cell]:
        """The cells of this process; a control goes with what it is a control of."""
        folders = list(dict.fromkeys(cell.folder for cell in cells))
        mine = set(folders[self.processes.rank :: self.processes.world])
        return [cell for cell in cells if cell.folder in mine]


def until(done: Callable[[], bool]) -> None:
    """Wait for what other processes write."""
    while not done():
        time.sleep(POLL)


def work(bench: Bench, cells: Sequence[Cell], *, progress: Progress = no_progress) -> None:
    """Do cells and keep their records: scores of heads first, controls last."""
    needed = dict.fromkeys((cell.method, bench.seed_of(cell)) for cell in cells if is_ranking(cell))
    scores: list[Task] = [each for each in needed if not bench.scores_path(*each).is_file()]
    plain: list[Task] = [cell for cell in cells if not cell.control]
    controls: list[Task] = [cell for cell in cells if cell.control]
    with progress("sweep", len(cells)) as step, _doing(bench) as do:
        for phase, counts in ((scores, 0), (plain, 1), (controls, 1)):
            for _ in do(phase):
                step(counts)


def do_task(bench: Bench, task: Task) -> None:
    """One cell, or the scores of one criterion."""
    if isinstance(task, Cell):
        write_cell(bench.config.out, task, run_cell(bench, task))
    else:
        bench.scores(*task)


Do = Callable[[Sequence[Task]], Iterator[None]]


@contextmanager
def _doing(bench: Bench) -> Iterator[Do]:
    """What does tasks, here or in `jobs` processes, and yields after each of them."""
    jobs = bench.config.jobs
    if jobs == 1:
        yield lambda tasks: _here(bench, tasks)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    before = set(multiprocessing.active_children())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=_enter, initargs=(bench.config, threads))
    try:
        yield lambda tasks: _in(pool, tasks)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
            child.join(POLL)
        raise


def _here(bench: Bench, tasks: Sequence[Task]) -> Iterator[None]:
    for task in tasks:
        do_task(bench, task)
        yield


def _in(pool: ProcessPoolExecutor, tasks: Sequence[Task]) -> Iterator[None]:
    try:
        for future in as_completed([pool.submit(_work, task) for task in tasks]):
            future.result()
            yield
    except BrokenProcessPool:
        raise TrainingError(
            "a process of --jobs was killed, perhaps for want of memory; what is finished is kept: run the same "
            "command again, with fewer --jobs"
        ) from None


_BENCH: list[Bench] = []
_CONFIG: list[SweepConfig] = []


def _enter(config: SweepConfig, threads: int) -> None:
    """A process of --jobs: leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    torch.set_num_threads(threads)
    _CONFIG[:] = [config]


def _end_with(sentinel: int) -> None:
    wait([sentinel])
    os._exit(1)


def _work(task: Task) -> None:
    if not _BENCH:  # opened once in each process
        _BENCH.append(Bench(_CONFIG[0]))
    with process_settings():  # the process is the sweep's own
        do_task(_BENCH[0], task)
