"""Typer commands with plain help texts, and groups that build a command only when it is needed."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from headscope.config.option import first_sentence
from headscope.errors import ConfigError
from headscope.registry import unknown

ALL = "--help-all"
"""The flag of the help with every option."""
HELP = {"--help", "-h", ALL}
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Settings of every command's context: the flags and the largest width of help texts."""
PLAIN: dict[str, Any] = {"context_settings": SETTINGS, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Settings of every typer application."""
NAMES_WIDTH = 30
"""Largest width of the column of names; the explanation of a longer name begins on the next line."""
FIRST, LAST = ("Arguments", "Data"), ("Model and speed", "Output", "Options")
"""Headings that come before all others, and after them."""
MAX_OPTIONS = 18
"""The most options that --help lists without leaving any out."""


def short_help(text: str) -> str:
    """The first sentence of a help text, with the default at its end: `[default: 3]`."""
    sentence = first_sentence(text)
    default = re.search(r"\s+\[[^\]]*\]$", text[len(sentence) :])
    return sentence + (default[0] if default else "")


def row_lines(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """The lines of names and explanations in two columns; names are not broken at hyphens."""
    column = min(max(len(name) for name, _ in rows), NAMES_WIDTH) + 4
    wrapper = textwrap.TextWrapper(width - column, break_on_hyphens=False, break_long_words=False)
    for name, explanation in rows:
        lines = wrapper.wrap(explanation)
        first_line = lines.pop(0) if lines and len(name) <= column - 4 else ""
        yield f"  {name:{column - 2}}{first_line}".rstrip()
        yield from (f"{'':{column}}{line}" for line in lines)


def write_rows(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """Write a section of a help text: its heading, then names and explanations."""
    formatter.write(f"\n{heading}:\n")
    formatter.write("".join(f"{line}\n" for line in row_lines(rows, formatter.width)))


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Write all options under their headings: arguments and data first, options that every command has last.

    Where `rare_options` are left out, the explanation of an option is its first sentence, and the last line counts the
    options that --help-all adds.
    """
    sections: dict[str, list[tuple[str, str]]] = {}
    rare = rare_options(command, context)
    for parameter in command.get_params(context):
        if parameter.name not in rare and (row := parameter.get_help_record(context)) is not None:
            row = (row[0].partition(" <")[0], short_help(row[1]) if rare else row[1])
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            sections.setdefault(heading, []).append(row)
    order = [*FIRST, "", *LAST]
    for heading in sorted(sections, key=lambda heading: order.index(heading if heading in order else "")):
        write_rows(formatter, heading, sections[heading])
    if rare:
        formatter.write(f"\n{len(rare) - 1} more options, and more about these: {context.command_path} {ALL}\n")


def rare_options(command: Any, context: Any) -> set[str]:
    """Names of the options that --help leaves out: of many, those that are not `common`, and --help itself."""
    rare: set[str] = getattr(command.callback, "rare", set())
    is_shortened = rare and len(command.get_params(context)) > MAX_OPTIONS and not context.meta.get(ALL)
    return {*rare, "help"} if is_shortened else set()


class PlainCommand(TyperCommand):
    """A command with a plain help text.

    An option that is given twice has its last value, so that options appended to a script's command change it. Lists
    may be given once only (`headscope.cli.options.only_one`).
    """

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the command's help text; only its first paragraphs where --help leaves out options."""
        full_help = self.help
        if rare_options(self, ctx):
            self.help = "\n\n".join((full_help or "").split("\n\n")[:2])
        super().format_help_text(ctx, formatter)
        self.help = full_help

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under their headings."""
        write_options(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, or print the help; an option without its optional value (`[cheap|all]`) has the first.

        Returns the arguments that are left over, as click demands.
        """
        show_help(ctx, args[: args.index("--")] if "--" in args else args)
        metavars = {flag: str(option.metavar) for option in self.get_params(ctx) for flag in option.opts}
        choices = {flag: text[1:-1].split("|") for flag, text in metavars.items() if text.startswith("[")}
        words = list[str]()
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            has_value = word not in choices or get_close_matches(following, choices[word], n=1)
            words += [word] if has_value else [word, choices[word][0]]
        return super().parse_args(ctx, words)


def show_help(context: Any, words: Sequence[str]) -> None:
    """Print the help and exit if one of the words is its flag; skips typer's slow parsing of options."""
    if HELP & {*words}:
        context.meta[ALL] = ALL in words
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


def build_command(function: Callable[..., Any], name: str, help: str | None = None) -> Any:
    """The typer command of a function that `options_from` made."""
    group = typer.Typer(add_completion=False, **PLAIN)
    group.command(name=name, help=help, cls=PlainCommand)(function)
    return typer.main.get_command(group)


class LazyGroup(TyperGroup):
    """A group of commands; `make` builds a command by its name when it is run or its help is printed.

    `summaries` has the first line of each command's help, in their order. `kind` is what errors call a command. Under
    torchrun, commands that are not `shared` (None: all are) are refused, as every process would do the same work.
    """

    def __init__(
        self,
        summaries: Mapping[str, str],
        make: Callable[[str], Any],
        *,
        kind: str = "command",
        shared: Sequence[str] | None = None,
        **settings: Any,
    ) -> None:
        usual = {"context_settings": SETTINGS, "no_args_is_help": True, "rich_markup_mode": None}
        super().__init__(**{**usual, **settings})
        self.summaries, self.make, self.kind, self.shared = summaries, make, kind, shared

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of commands, in the order of the help."""
        return list(self.summaries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; ConfigError with the nearest name for an unknown one."""
        if cmd_name not in self.summaries and os.path.exists(cmd_name):
            usage = f"{ctx.command_path} {self.kind.upper()} {cmd_name} …; choose from {', '.join(self.summaries)}"
            raise ConfigError(f"{cmd_name} stands where a {self.kind} is expected: {usage}")
        if cmd_name not in self.summaries:
            raise ConfigError(unknown(self.kind, cmd_name, list(self.summaries)))
        command = self.make(cmd_name)
        command.name = cmd_name
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the group's own arguments, or print the help."""
        show_help(ctx, args[:1])
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The named command and its arguments; ConfigError, on rank 0, for a command that torchrun cannot run."""
        name = args[0]
        if self.shared is not None and name not in self.shared and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if os.environ.get("RANK", "0") != "0":
                raise typer.Exit
            group = f"{ctx.info_name} " if ctx.parent is not None else ""
            raise ConfigError(f"headscope {group}{name} runs in one process; start it without torchrun")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write every command with the first line of its help, then the options."""
        write_rows(formatter, "Commands", [*self.summaries.items()])
        write_options(self, ctx, formatter)
