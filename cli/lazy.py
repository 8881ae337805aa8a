"""Groups of commands that are imported on first use, and help texts that wait for nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import typer

from headscope.cli.failures import Application
from headscope.cli.help_text import SETTINGS, PlainCommand, PlainGroup
from headscope.errors import ConfigError

HELP = ("--help", "-h")


class LazyGroup(PlainGroup):
    """Commands that are imported when they are run or their help is asked for.

    `summaries` has the first line of each command's help. `modules` says in which module of `headscope.cli` a command
    is, where that has not its name; the module has a function of the command's name, or a typer `app`.
    """

    summaries: Mapping[str, str] = {}
    modules: Mapping[str, str] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(self.summaries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; ConfigError with the nearest one where there is none."""
        if cmd_name not in self.summaries:
            from headscope.registry import unknown

            raise ConfigError(unknown("command", cmd_name, list(self.summaries)))
        module = import_module(f"headscope.cli.{self.modules.get(cmd_name, cmd_name)}")
        target = getattr(module, "app", None)
        if target is None:
            target = Application(add_completion=False)
            target.command()(getattr(module, cmd_name))
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The help text, for which no command is imported."""
        names = _Names(name=self.name, params=self.params, help=self.help, epilog=self.epilog, rich_markup_mode=None)
        names.summaries = self.summaries
        names.format_help(ctx, formatter)


class _Names(LazyGroup):
    """The commands as the help of their group shows them: name and first line."""

    format_help = PlainGroup.format_help

    def get_command(self, ctx: Any, cmd_name: str) -> PlainCommand:
        """The command with its first line of help and nothing else."""
        return PlainCommand(cmd_name, help=self.summaries[cmd_name], short_help=self.summaries[cmd_name])


def help_context(command: Any, name: str, arguments: Sequence[str], parent: Any = None) -> Any:
    """The context of the command whose help a command line asks for; None where it asks for none.

    Found from the names alone: options are not read, which is what takes typer longest.
    """
    before_dashes = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if not any(argument in HELP for argument in before_dashes):
        return None
    context = typer.Context(command, info_name=name, parent=parent, **SETTINGS)
    if not isinstance(command, PlainGroup) or not arguments or arguments[0].startswith("-"):
        return context if not isinstance(command, PlainGroup) or arguments[0] in HELP else None
    subcommand = command.get_command(context, arguments[0])
    return None if subcommand is None else help_context(subcommand, arguments[0], arguments[1:], context)
