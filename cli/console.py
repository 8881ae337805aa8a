"""Output of the command line: results on stdout, progress and errors on stderr.

A result is its answers (each a heading, at most one table, one sentence), then its files and the next commands.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from headscope.progress import bar, console_for_text

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console
    from rich.text import Text

    from headscope.results.answer import Answer, AnswerTable, Result

WIDTH = 100
"""Width of output to a file or a pipe."""


def results_console() -> Console:
    """The console for results: as wide as the terminal or COLUMNS says, else `WIDTH`."""
    console = console_for_text()
    has_width = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if has_width else console_for_text(width=WIDTH)


def show(lines: Iterable[str | Text]) -> None:
    """Print lines without wrapping them, so that commands can be copied whole."""
    screen = results_console()
    for line in lines:
        screen.print(line, soft_wrap=True)


def say(message: str) -> None:
    """Print a remark on stderr."""
    console_for_text(stderr=True).print(message, soft_wrap=True)


def end_interrupted(what: str) -> NoReturn:
    """Print that work was interrupted and `what` remains of it, and exit with the status of Ctrl-C."""
    say(f"interrupted{what}")
    raise typer.Exit(130)


def print_json(value: Any) -> None:
    """Print JSON on stdout; NaN and infinities, which JSON lacks, become null."""
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    print(json.dumps(finite, indent=2, allow_nan=False))


progress, updates = bar, partial(bar, unit="steps")
"""Progress on stderr, of sentences, and of updates or other steps."""
INDENT = GAP = "   "
UNLIMITED = 10_000  # columns: no line is cut
NUMBER = re.compile(r"([−-]?[\d.,e−%]+( to [−-]?[\d.,e−%]+)?)?$")


@dataclass(frozen=True)
class Printer:
    """Prints the result of a command: as JSON, or for people; `verbose` adds details and the signature."""

    json: bool = False
    verbose: bool = False

    def show(
        self,
        result: Result,
        *,
        out: Path | None = None,
        files: Iterable[str] = (),
        commands: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Print answers, files and next commands (purpose, command); as JSON `out`, the record and the answers."""
        from rich.text import Text

        paths = {"out": str(out)} if out else {}
        paths |= {"pushed": result.pushed} if result.pushed else {}
        if self.json:
            print_json({**paths, **result.to_json()})
            return
        width = UNLIMITED if self.verbose else results_console().width
        show(answer_lines(result.answers(), verbose=self.verbose, width=width))
        if self.verbose:
            show([Text(str(result.signature), style="dim")])
        files = [*files, f"Pushed to {result.pushed}"] if result.pushed else files
        show([*map(Text, files), *(Text(f"{purpose}:  {command}") for purpose, command in commands)])


def answer_lines(answers: Iterable[Answer], *, verbose: bool, width: int) -> Iterator[Text]:
    """The lines of answers; details only if `verbose`."""
    from rich.text import Text

    for answer in answers:
        if answer.detail and not verbose:
            continue
        heading = Text(answer.question, style="bold yellow" if answer.caution else "bold")
        if answer.table is None:
            separator = ": " if answer.question else ""
            yield heading.append(separator + answer.sentence, style="not bold")
            continue
        columns = [name for name in answer.table.columns[1:] if name]
        yield heading.append("   " + " · ".join(columns), style="not bold dim")
        yield from map(Text, table_lines(answer.table, width))
        if answer.sentence:
            yield Text(INDENT + answer.sentence)


def table_lines(table: AnswerTable, width: int) -> Iterator[str]:
    """The rows of a table in columns, numbers right-aligned; wide rows have narrower gaps, and are cut if needed."""
    columns = list(zip(*table.rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    are_numbers = [index > 0 and all(map(NUMBER.match, column)) for index, column in enumerate(columns)]
    justifiers = [str.rjust if numbers else str.ljust for numbers in are_numbers]
    is_wide = len(INDENT) + sum(sizes) + len(GAP) * (len(sizes) - 1) > width
    for row in table.rows:
        cells = (justify(cell, size) for justify, cell, size in zip(justifiers, row, sizes, strict=True))
        line = INDENT + (GAP[1:] if is_wide else GAP).join(cells).rstrip()
        yield line if len(line) <= width else line[: width - 1] + "…"
