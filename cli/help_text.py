"""Help texts: plain text, options under the headings of their panels.

typer's own with rich imports a Markdown reader and a highlighter, which takes longer than all else that `--help` does.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import Any

from typer.core import TyperCommand, TyperGroup

from headscope.bounds import WHOLE

SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command's context: how help is asked for, and the columns that it takes at most."""
NAMES_WIDTH = 30
"""Columns of the names at most; what is explained of a longer name begins on the next line."""


FIRST, LAST = ("Arguments", "Data"), ("Model and speed", "Output", "Options")
"""Headings that stand before all others, and after them."""
NO_LIMIT = f"<={WHOLE}"
"""How typer says that a number may be as large as one can be."""


def row_of(parameter: Any, context: Any) -> tuple[str, str] | None:
    """How an option is written, and what is said of it; None for a hidden one.

    As typer has it, with a word for the value where typer names its type.
    """
    if (record := parameter.get_help_record(context)) is None:
        return None
    if parameter.param_type_name == "argument":
        return record[0].partition(" <")[0], record[1]
    numbers = re.sub(r"<(int|float)( range)?>", "N", record[0])
    return re.sub(r" <\w+(\[\w+\])?>", " …", numbers), record[1].replace(NO_LIMIT, "")


def write_rows(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """A section of names and what is said of them; names of options are not broken at their hyphens."""
    column = min(max(len(name) for name, _ in rows), NAMES_WIDTH) + 4
    wrapped = textwrap.TextWrapper(formatter.width - column, break_on_hyphens=False, break_long_words=False)
    formatter.write(f"\n{heading}:\n")
    for name, explanation in rows:
        lines = wrapped.wrap(explanation)
        beside = lines.pop(0) if lines and len(name) <= column - 4 else ""
        formatter.write(f"  {name:{column - 2}}{beside}".rstrip() + "\n")
        formatter.write("".join(f"{'':{column}}{line}\n" for line in lines))


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Arguments and data first, what all commands have last, else the headings in the order of the declarations."""
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(context):
        if (row := row_of(parameter, context)) is not None:
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            sections.setdefault(heading, []).append(row)
    for heading in sorted(sections, key=_place):
        write_rows(formatter, heading, sections[heading])


def _place(heading: str) -> int:
    """Where the section of a heading stands."""
    order = [*FIRST, "", *LAST]
    return order.index(heading if heading in order else "")


class PlainCommand(TyperCommand):
    """A command with a plain help text."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options under the headings of their panels."""
        write_options(self, ctx, formatter)


class PlainGroup(TyperGroup):
    """A group of commands with a plain help text: commands first, which are what a group is for."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Every command with the first line of its help, then options under the headings of their panels."""
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, command.get_short_help_str(1000)) for name, command in commands if command and not command.hidden
        ]
        if rows:
            write_rows(formatter, "Commands", rows)
        write_options(self, ctx, formatter)
