"""The files of `examples/config`, one for each command that takes `--config`.

`python -m scripts.config_files` writes them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING
from functools import cache
from pathlib import Path
from typing import Any

import typer

from headscope.cli import main
from headscope.cli.options import Entry, kind_of
from headscope.config.option import declared_options
from scripts.documented import ROOT

FOLDER = ROOT / "examples" / "config"


@cache
def configurable() -> dict[str, Any]:
    """Every command that takes `--config`, by its words."""
    return {
        words: command for words, command in _below(typer.main.get_command(main.app), ()) if "config" in _names(command)
    }


def _below(command: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    if not hasattr(command, "list_commands"):
        yield " ".join(words), command
        return
    context = command.context_class(command)
    for name in command.list_commands(context):
        yield from _below(command.get_command(context, name), (*words, name))


def _names(command: Any) -> set[str]:
    return {parameter.name for parameter in command.params}


def options(command: Any) -> list[Entry]:
    """The options of a command's file."""
    return [(entry, hint) for entry, hint in command.callback.entries if not entry.metadata["argument"]]


def owners(command: Any) -> dict[str, list[Entry]]:
    """The options of analyses, by table of a command's file."""
    registry = command.callback.owners
    return {name: list(declared_options(cls)) for name, cls in sorted(registry().items())} if registry else {}


def example(entry: Any, hint: Any) -> str:
    """An option's default as TOML; where it has none, a value of its type that stands for one."""
    default = entry.metadata["unset"] or entry.default
    if isinstance(default, tuple) and default:
        return json.dumps(list(default))
    if isinstance(default, bool | int | float | str):
        return json.dumps(default)
    if isinstance(default, Path):
        return json.dumps(str(default))
    kind = kind_of(hint)
    number = {int: "1", float: "0.5", tuple[int, ...]: "[1]", tuple[float, ...]: "[0.5]"}.get(kind)
    return number or json.dumps(entry.metadata["metavar"] or entry.name.upper())


def lines_of(entry: Any, hint: Any) -> list[str]:
    """The lines of an option with its help."""
    default = entry.default
    state = " (required)" if default is MISSING else " (unset)" if default in (None, ()) else ""
    text = textwrap.wrap(f"{entry.metadata['help']}{state}", 118, initial_indent="# ", subsequent_indent="# ")
    name = (entry.metadata["name"] or entry.name).replace("_", "-")
    return ["", *text, f"#{name} = {example(entry, hint)}"]


def page(words: str, command: Any) -> str:
    """The whole file of a command."""
    lines = [
        f"# headscope {words} … --config {filename(words)}",
        "# Every option with its default, or with a placeholder where it is unset. Options on the command line win.",
    ]
    for entry, hint in options(command):
        lines += lines_of(entry, hint)
    for name, entries in ((name, entries) for name, entries in owners(command).items() if entries):
        lines += ["", f"#[{name}]", *(line for pair in entries for line in lines_of(*pair))]
    return "\n".join(lines) + "\n"


def filename(words: str) -> str:
    """The name of a command's file."""
    return f"{words.replace(' ', '-')}.toml"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for words, command in configurable().items():
        (FOLDER / filename(words)).write_text(page(words, command), encoding="utf-8")
