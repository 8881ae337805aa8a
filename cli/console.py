"""Output of the command line: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console


def out() -> Console:
    """The console for results."""
    from rich.console import Console

    return Console(highlight=False)


def err() -> Console:
    """The console for progress, remarks and errors."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def say(message: str) -> None:
    """A remark on stderr."""
    err().print(message, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """JSON on stdout; NaN becomes null."""
    print(json.dumps(_without_nan(value), indent=2))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value


@contextmanager
def progress(title: str, total: int, *, unit: str = "sentences") -> Iterator[Callable[[int], None]]:
    """A progress bar with rate and time left on stderr; nothing where stderr is no terminal."""
    from headscope.progress import bar

    console = err()
    with bar(title, total, unit=unit, console=console, shown=console.is_terminal) as step:
        yield step


@contextmanager
def counter(title: str, *, unit: str = "lines") -> Iterator[Callable[[int], None]]:
    """A count with its rate on stderr, for a stream of unknown length; nothing where stderr is no terminal."""
    from rich.progress import Progress, SpinnerColumn, TextColumn

    console = err()
    columns = (
        SpinnerColumn(),
        TextColumn(title),
        TextColumn("{task.completed:.0f} " + unit),
        TextColumn("{task.fields[rate]}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None, rate="")

        def step(count: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, advance=count, rate=f"{speed:.0f} {unit}/s" if speed else "")

        yield step


@contextmanager
def updates(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar of updates or other steps."""
    with progress(title, total, unit="steps") as step:
        yield step
