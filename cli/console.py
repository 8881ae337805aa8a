"""Output of the command line: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import os
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from headscope.progress import console_for_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.table import Table


WIDTH = 100
"""Columns of tables in a file or a pipe; one whose words, such as paths, are longer is wider, and not cut."""


def out() -> Console:
    """The console for results: as wide as the terminal or COLUMNS says, and `WIDTH` where there is neither."""
    console = console_for_text()
    known = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if known else console_for_text(width=WIDTH)


def show(parts: Iterable[Any]) -> None:
    """Print tables and lines of text; lines are not broken, so that what is in them can be copied whole.

    A table that a terminal has no room for is folded in its cells, never cut.
    """
    from rich.text import Text

    screen, has_width = out(), os.environ.get("COLUMNS", "").isdigit()
    fixed = screen.is_terminal or has_width
    for part in parts:
        if not isinstance(part, (str, Text)) and _least(part, screen) > screen.width:
            for column in part.columns:
                column.no_wrap, column.overflow = column.no_wrap and not fixed, "fold"
        if screen.is_terminal or isinstance(part, (str, Text)):
            screen.print(part, soft_wrap=isinstance(part, (str, Text)))
            continue
        wide = console_for_text(width=screen.width if has_width else max(screen.width, _least(part, screen)))
        with wide.capture() as drawn:
            wide.print(part)
        for line in drawn.get().splitlines():
            print(line.rstrip())


def _least(table: Table, screen: Console) -> int:
    """Columns that a table needs where no word is broken."""
    from rich.measure import Measurement

    wide = screen.options.update_width(10_000)
    needed = 0
    for column in table.columns:
        cells = (Measurement.get(screen, wide, cell) for cell in (column.header, *column.cells))
        needed += max(cell.maximum if column.no_wrap else cell.minimum for cell in cells)
    return needed + len(table.columns) * (sum(table.padding[1::2]) + 1)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]] = (),
    *,
    numbers: Container[str] = (),
    whole: Container[str] = (),
) -> Table:
    """A table of rich; `numbers` are columns that stand on the right, `whole` those whose cells are never broken."""
    from rich import box
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        drawn.add_column(name, justify="right" if name in numbers else "left", no_wrap=name in whole)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def pushed(address: str) -> dict[str, str]:
    """What --json says of the hub: nothing where nothing was pushed."""
    return {"pushed": address} if address else {}


def err() -> Console:
    """The console for progress, remarks and errors."""
    return console_for_text(stderr=True)


def say(message: str) -> None:
    """A remark on stderr."""
    err().print(message, soft_wrap=True)


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
def progress(title: str, total: int | None, *, unit: str = "sentences") -> Iterator[Callable[[int], None]]:
    """Rate and, of a known total, time left on stderr: a bar, or a line now and then where that is no terminal."""
    from headscope.progress import bar, lines

    screen = err()
    if screen.is_terminal:
        with bar(title, total, unit=unit, console=screen) as step:
            yield step
    else:
        with lines(title, total, unit=unit, say=say) as step:
            yield step


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Which stage a command is in, on stderr: beside a spinner; where that is no terminal, as a line now and then."""
    from headscope.progress import stages as stage_lines

    screen = err()
    if not screen.is_terminal:
        with stage_lines(say=say) as begin:
            yield begin
        return
    with screen.status("") as status:
        yield status.update


updates = partial(progress, unit="steps")
"""A progress bar of updates or other steps."""
