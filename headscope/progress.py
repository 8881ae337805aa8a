"""How long work tells whoever started it how far it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Entered with what is done and how much of it there is, it gives a function to call with each step's share."""


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing."""
    return nullcontext(lambda count: None)


def reported(callback: Callable[[str, int, int], object]) -> Progress:
    """Calls `callback(what, done, total)` at the beginning of some work and after each step of it."""

    @contextmanager
    def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            callback(what, done, total)

        step(0)
        yield step

    return progress


@contextmanager
def bar(
    what: str, total: int, *, unit: str = "sentences", console: Console | None = None, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left, on `console` (default: stderr, or the cell of a notebook)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True, disable=not shown) as display:
        task = display.add_task(what, total=total, rate="")

        def step(count: int) -> None:
            speed = display.tasks[0].speed
            display.update(task, advance=count, rate=f"{speed:.0f} {unit}/s" if speed else "")

        yield step
