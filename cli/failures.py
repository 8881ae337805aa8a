"""Help texts of commands, and errors as one line on stderr."""

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
from headscope.errors import ConfigError, HeadscopeError, one_line
from headscope.files.writing import write_failure
from headscope.registry import unknown

ALL = "--help-all"
"""Asks for the help with every option."""
HELP = {"--help", "-h", ALL}
SETTINGS: dict[str, Any] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
"""Of every command's context: how help is asked for, and the columns that it takes at most."""
PLAIN: dict[str, Any] = {"context_settings": SETTINGS, "rich_markup_mode": None, "pretty_exceptions_enable": False}
"""Of every typer application."""
NAMES_WIDTH = 30
"""Columns of the names at most; what is explained of a longer name begins on the next line."""


FIRST, LAST = ("Arguments", "Data"), ("Model and speed", "Output", "Options")
"""Headings that stand before all others, and after them."""
MAX_OPTIONS = 18
"""Options that --help shows without a choice."""


def short(text: str) -> str:
    """The first sentence of an explanation, and what stands behind all of them: `[default: 3]`."""
    sentence = first_sentence(text)
    behind = re.search(r"\s+\[[^\]]*\]$", text[len(sentence) :])
    return sentence + (behind[0] if behind else "")


def row_lines(rows: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Names and explanations in two columns; names of options are not broken at their hyphens."""
    column = min(max(len(name) for name, _ in rows), NAMES_WIDTH) + 4
    wrapper = textwrap.TextWrapper(width - column, break_on_hyphens=False, break_long_words=False)
    for name, explanation in rows:
        lines = wrapper.wrap(explanation)
        first_line = lines.pop(0) if lines and len(name) <= column - 4 else ""
        yield f"  {name:{column - 2}}{first_line}".rstrip()
        yield from (f"{'':{column}}{line}" for line in lines)


def write_rows(formatter: Any, heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """A section of a help text."""
    formatter.write(f"\n{heading}:\n")
    formatter.write("".join(f"{line}\n" for line in row_lines(rows, formatter.width)))


def write_options(command: Any, context: Any, formatter: Any) -> None:
    """Arguments and data first, what all commands have last, else the headings in the order of the declarations.

    Of many options those that are declared `common`, the first sentence of each, and how the others are asked for.
    """
    sections: dict[str, list[tuple[str, str]]] = {}
    rare = rare_options(command, context)
    for parameter in command.get_params(context):
        if parameter.name not in rare and (row := parameter.get_help_record(context)) is not None:
            row = (row[0].partition(" <")[0], short(row[1]) if rare else row[1])
            kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
            heading = getattr(parameter, "rich_help_panel", None) or kind
            sections.setdefault(heading, []).append(row)
    order = [*FIRST, "", *LAST]
    for heading in sorted(sections, key=lambda heading: order.index(heading if heading in order else "")):
        write_rows(formatter, heading, sections[heading])
    if rare:
        formatter.write(f"\n{len(rare) - 1} more options, and more about these: {context.command_path} {ALL}\n")


def rare_options(command: Any, context: Any) -> set[str]:
    """Names of the parameters that this help leaves out: those that are not `common` if there are many, and --help."""
    rare: set[str] = getattr(command.callback, "rare", set())
    shortens = rare and len(command.get_params(context)) > MAX_OPTIONS and not context.meta.get(ALL)
    return {*rare, "help"} if shortens else set()


USAGE: type[Exception] = typer.BadParameter.__bases__[0]  # click's UsageError: typer brings a click of its own
NO_MEMORY = re.compile(r"can't allocate memory|out of memory|std::bad_alloc")


def user_message(error: BaseException) -> str | None:
    """The message for an error that the user can fix; None for a bug of headscope."""
    if isinstance(error, HeadscopeError):
        return one_line(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY.search(str(error))):
        detail = f" ({text})" if (text := one_line(error)[:160]) else ""
        return f"there is not enough memory{detail}; take a smaller --batch-tokens, --max-length or model"
    if not isinstance(error, OSError) and error.__cause__ is None and (reason := write_failure(error)):
        return f"cannot write a file: {reason}; free some space, or name another folder (TMPDIR for temporary files)"
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and isinstance(error, RuntimeError):
        from torch import distributed

        if isinstance(error, distributed.DistError) or "gloo" in str(error) or "closed by peer" in str(error):
            return "another process of this torchrun has ended before its work was done"
    return None


class PlainCommand(TyperCommand):
    """A command with a plain help text.

    Of an option that is given twice the last one counts, as everywhere: so a script's own options can be changed behind
    them. Lists are taken once (`headscope.cli.options`).
    """

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """The command's help text; only the first paragraphs where --help omits options."""
        whole = self.help
        if rare_options(self, ctx):
            self.help = "\n\n".join((whole or "").split("\n\n")[:2])
        super().format_help_text(ctx, formatter)
        self.help = whole

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Options under the headings of their panels."""
        write_options(self, ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left, where values may be left out (`[cheap|all]`) the first; or the help."""
        show_help(ctx, args[: args.index("--")] if "--" in args else args)
        metavars = {flag: str(option.metavar) for option in self.get_params(ctx) for flag in option.opts}
        choices = {flag: text[1:-1].split("|") for flag, text in metavars.items() if text.startswith("[")}
        words = list[str]()
        for word, following in zip(args, [*args[1:], "-"], strict=False):
            has_value = word not in choices or get_close_matches(following, choices[word], n=1)
            words += [word] if has_value else [word, choices[word][0]]
        return super().parse_args(ctx, words)


def show_help(context: Any, words: Sequence[str]) -> None:
    """Print the help and end where one of the words asks for it; options are not read, which takes typer longest."""
    if HELP & {*words}:
        context.meta[ALL] = ALL in words
        typer.echo(context.get_help(), color=context.color)
        raise typer.Exit


def build_command(function: Callable[..., Any], name: str, help: str | None = None) -> Any:
    """The command of a function that `options_from` made."""
    group = typer.Typer(add_completion=False, **PLAIN)
    group.command(name=name, help=help, cls=PlainCommand)(function)
    return typer.main.get_command(group)


class LazyGroup(TyperGroup):
    """Commands that are made when they are run or their help is asked for, with a plain help text.

    `summaries` has the first line of each command's help, in the order of the help; `make` makes the one of a name,
    `kind` is what errors call it. Under torchrun those that are not `shared` (None: all are) are refused: they would do
    the same in every process.
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
        """Names in the order of the help."""
        return list(self.summaries)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; ConfigError with the nearest one where there is none."""
        if cmd_name not in self.summaries and os.path.exists(cmd_name):
            usage = f"{ctx.command_path} {self.kind.upper()} {cmd_name} …; choose from {', '.join(self.summaries)}"
            raise ConfigError(f"{cmd_name} stands where a {self.kind} is expected: {usage}")
        if cmd_name not in self.summaries:
            raise ConfigError(unknown(self.kind, cmd_name, list(self.summaries)))
        command = self.make(cmd_name)
        command.name = cmd_name
        return command

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """The arguments that are left."""
        show_help(ctx, args[:1])
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is named, and its arguments; under torchrun rank 0 says which cannot run there."""
        name = args[0]
        if self.shared is not None and name not in self.shared and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            if os.environ.get("RANK", "0") != "0":
                raise typer.Exit
            group = f"{ctx.info_name} " if ctx.parent is not None else ""
            raise ConfigError(f"headscope {group}{name} runs in one process; start it without torchrun")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Every command with the first line of its help, then options under the headings of their panels."""
        write_rows(formatter, "Commands", [*self.summaries.items()])
        write_options(self, ctx, formatter)
