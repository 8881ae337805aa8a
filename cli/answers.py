"""Answers on the terminal: a heading, at most one table, one sentence each; then files and commands to type."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headscope.cli import console

if TYPE_CHECKING:
    from pathlib import Path

    from rich.text import Text

    from headscope.results.answer import Answer, AnswerTable, Result

INDENT = GAP = "   "
WHOLE = 10_000  # columns: no line is cut
NUMBER = re.compile(r"([−-]?[\d.,e−%]+( to [−-]?[\d.,e−%]+)?)?$")


@dataclass(frozen=True)
class Printer:
    """How a command prints what it found: as `--json`, or for people, with details where they are `--verbose`."""

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
        """What a result says, its files, and commands by their purpose; as JSON `out`, its record and its answers."""
        from rich.text import Text

        hub_address = getattr(result, "pushed", "")
        if self.json:
            folder, address = {"out": str(out)} if out else {}, {"pushed": hub_address} if hub_address else {}
            console.print_json({**folder, **result.to_json(), **address})
            return
        width = WHOLE if self.verbose else console.out().width
        console.show(answer_lines(result.answers(), verbose=self.verbose, width=width))
        if self.verbose:
            console.show([Text(str(result.signature), style="dim")])
        files = [*files, f"Pushed to {hub_address}"] if hub_address else files
        console.show([*map(Text, files), *(Text(f"{purpose}:  {command}") for purpose, command in commands)])


def answer_lines(answers: Iterable[Answer], *, verbose: bool, width: int) -> Iterator[Text]:
    """The lines of answers; those with details only where they are asked for."""
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
    """Rows in columns, numbers on the right, closer together where they need it; what still does not fit is cut."""
    columns = list(zip(*table.rows, strict=True))
    sizes = [max(map(len, column)) for column in columns]
    are_numbers = [index > 0 and all(map(NUMBER.match, column)) for index, column in enumerate(columns)]
    places = [str.rjust if numbers else str.ljust for numbers in are_numbers]
    is_wide = len(INDENT) + sum(sizes) + len(GAP) * (len(sizes) - 1) > width
    for row in table.rows:
        cells = (place(cell, size) for place, cell, size in zip(places, row, sizes, strict=True))
        line = INDENT + (GAP[1:] if is_wide else GAP).join(cells).rstrip()
        yield line if len(line) <= width else line[: width - 1] + "…"
