"""Progress reports of long work: callbacks, and a bar."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Called with a title and a total; within the context manager, call its value with the size of each step."""


def no_progress(title: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A `Progress` that shows nothing."""
    return nullcontext(lambda count: None)


def reported(callback: Callable[[str, int, int], object]) -> Progress:
    """A `Progress` that calls `callback(title, done, total)` at the start and after each step."""

    @contextmanager
    def progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
        done = 0

        def step(count: int) -> None:
            nonlocal done
            done += count
            callback(title, done, total)

        step(0)
        yield step

    return progress


@contextmanager
def bar(
    title: str, total: int, *, unit: str = "sentences", console: Console | None = None, shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left, on `console` (default: stderr, or the cell of a notebook)."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True, disable=not shown) as display:
        task = display.add_task(title, total=total, rate="")

        def step(count: int) -> None:
            speed = display.tasks[0].speed
            display.update(task, advance=count, rate=f"{speed:.0f} {unit}/s" if speed else "")

        yield step
