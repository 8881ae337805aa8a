"""The files of `examples/config`, one for each command that takes `--config`.

`python -m tests.makers.config_files` writes them.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from headscope.cli import main
from headscope.cli.options import InFile
from tests.makers.modules import ROOT

FOLDER = ROOT / "examples" / "config"


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


def options(command: Any) -> dict[str, Any]:
    """What may stand in a command's file: its options by their long names, without `--config` itself."""
    found = {}
    for parameter in command.params:
        long = [name.removeprefix("--") for name in parameter.opts if name.startswith("--")]
        if long and parameter.name not in ("config", "help"):
            found[long[0]] = parameter
    return found


def in_file(command: Any, parameter: Any) -> InFile:
    """What a file may say of an option; of --json, which is no config's, true or false."""
    about: InFile = command.callback.in_file.get(parameter.name, InFile(bool))
    return about


def example(parameter: Any, about: InFile) -> str:
    """An option's default as TOML; where it has none, a value of its type that stands for one."""
    default = parameter.default
    if isinstance(default, bool | int | float | str):
        return json.dumps(default)
    if isinstance(default, Path):
        return json.dumps(str(default))
    assert default is None, parameter.name
    number = {int: "1", float: "0.5", tuple[int, ...]: "[1]", tuple[float, ...]: "[0.5]"}.get(about.kind)
    return number or json.dumps(parameter.metavar or parameter.name.upper())


def page(words: str, command: Any) -> str:
    """The whole file of a command."""
    lines = [
        f"# headscope {words} … --config {filename(words)}",
        "# Every option with its default, or with a placeholder where it is unset. Options on the command line win.",
    ]
    for name, parameter in options(command).items():
        state = " (required)" if parameter.required else " (unset)" if parameter.default is None else ""
        lines += ["", *textwrap.wrap(f"{parameter.help}{state}", 118, initial_indent="# ", subsequent_indent="# ")]
        lines.append(f"#{name} = {example(parameter, in_file(command, parameter))}")
    return "\n".join(lines) + "\n"


def filename(words: str) -> str:
    """The name of a command's file."""
    return f"{words.replace(' ', '-')}.toml"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for words, command in configurable().items():
        (FOLDER / filename(words)).write_text(page(words, command), encoding="utf-8")
