"""Progress of long work: callbacks, a bar for terminals, lines for logs; and the console, which prints untrusted text.

Others choose the names of directories and checkpoints. Escape sequences and marks of direction in them could rewrite
what a terminal shows, so `console_for_text` shows these characters as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from headscope.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

Step = Callable[..., None]
"""Called with the work done since the last call, and optionally a `note`."""
Progress = Callable[..., AbstractContextManager[Step]]
"""Called with a title, a total and optionally a `unit`; the value of its context manager is the `Step` to call."""

INTERVAL = 30.0
"""Seconds between lines of progress."""


def console_for_text(**options: Any) -> Console:
    """A console of rich that prints texts as they are: `printable`, without markup, emoji or highlights.

    Tables, bars and styles of headscope itself are drawn as usual.
    """
    from rich.console import Console
    from rich.segment import Segment

    class Printable(Console):
        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for text, style, control in super().render(renderable, options):
                yield Segment(text if control else printable(text), style, control)

    return Printable(**{"highlight": False, "markup": False, "emoji": False, **options})


def no_progress(title: str, total: int | None, *, unit: str = "sentences") -> AbstractContextManager[Step]:
    """A `Progress` that shows nothing."""
    return nullcontext(lambda count, note="": None)


def report_to(callback: Callable[[str, int, int], object]) -> Progress:
    """A `Progress` that calls `callback(title, done, total)` at the start and after each step."""

    @contextmanager
    def progress(title: str, total: int | None, *, unit: str = "sentences") -> Iterator[Step]:
        count_done = 0

        def step(count: int, note: str = "") -> None:
            nonlocal count_done
            count_done += count
            callback(title, count_done, total or 0)

        step(0)
        yield step

    return progress


@contextmanager
def bar(title: str, total: int | None, *, unit: str = "sentences") -> Iterator[Step]:
    """Rate and time left on stderr or in the cell of a notebook: a bar, or `lines` where that is no terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    screen = console_for_text(stderr=True)
    if not (screen.is_terminal or screen.is_jupyter):
        with lines(title, total, unit=unit, say=lambda text: screen.print(text, soft_wrap=True)) as step:
            yield step
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=screen, transient=True) as display:
        task = display.add_task(title, total=total, rate="", note="")

        def step(count: int, note: str = "") -> None:
            speed = display.tasks[0].speed
            display.update(task, advance=count, rate=f"{speed:.0f} {unit}/s" if speed else "", note=note)

        yield step


@contextmanager
def lines(title: str, total: int | None, *, unit: str, say: Callable[[str], None]) -> Iterator[Step]:
    """Progress as a plain line every `INTERVAL` seconds, for logs."""
    last_report, count_done = time.monotonic(), 0

    def step(count: int, note: str = "") -> None:
        nonlocal count_done, last_report
        now = time.monotonic()
        count_done += count
        if now - last_report >= INTERVAL:
            last_report = now
            of_total = "" if total is None else f" of {total:,}"
            say(f"{title}: {count_done:,}{of_total} {unit}{note and f', {note}'}")

    yield step
