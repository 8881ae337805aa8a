"""The `headscope` command: one file per sub-command, heavy imports only inside them."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from headscope.cli.failures import described, in_one_line, one_process, speaks
from headscope.errors import ConfigError, options_as_flags
from headscope.files import interrupts
from headscope.model.process_settings import process_settings

COMMANDS = {
    "show": "show",
    "analyze": "analyze",
    "train": "app",
    "plot": "app",
    "prune": "app",
    "evaluate": "evaluate",
    "translate": "translate",
    "convert": "convert",
    "demo": "demo",
}
"""The module of each command in this folder, and the name in it: a function, or a typer app with sub-commands."""
SHARED = ("analyze", "train", "prune")
"""Commands that run under torchrun in several processes (`prune` limits this to some of its methods)."""

EPILOG = """\
Start here:  headscope demo

Your own:  headscope show CKPT,  headscope analyze CKPT --source text.en --out run,
headscope plot heads run --out heads.pdf"""


class Commands(TyperGroup):
    """The commands; each is imported on first use, so that its help does not wait for the imports of the others.

    What click refuses becomes a ConfigError in one line; for options of the MHR fork and fairseq it names headscope's.
    """

    def make_context(self, *given: Any, **options: Any) -> Any:
        """The context of the whole command line, as typer makes it."""
        with in_one_line():
            return super().make_context(*given, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest of the command line and run the command."""
        with in_one_line():
            return super().invoke(ctx)

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of that name; ConfigError with the nearest one where there is none."""
        if cmd_name not in COMMANDS:
            from headscope.registry import unknown

            raise ConfigError(unknown("command", cmd_name, list(COMMANDS)))
        target = getattr(import_module(f"headscope.cli.{cmd_name}"), COMMANDS[cmd_name])
        if not isinstance(target, typer.Typer):
            function, target = target, typer.Typer(add_completion=False)
            target.command()(function)
        command = typer.main.get_command(target)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=Commands,
    name="headscope",
    help="What the attention heads of a trained Transformer do, how much each one matters, and which can go.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from headscope.version import VERSION

        print(f"headscope {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    version: bool = typer.Option(
        False, "--version", help="Print the version and end.", callback=_version, is_eager=True
    ),
) -> None:
    """What the attention heads of a trained Transformer do, how much each one matters, and which can go."""
    one_process(context, shared=SHARED)


def run() -> None:
    """Entry point: errors that the user can fix end with one line and status 2, Ctrl-C with 130, SIGTERM with 143."""
    try:
        with interrupts.listening():
            _run()
    except KeyboardInterrupt:  # it came before the command or after it
        _end_interrupted()
    except OSError as error:  # unexpected, or of stdout itself
        sys.stdout = None  # else Python would try again at exit, and say so
        if not isinstance(error, BrokenPipeError):
            where = f" {error.filename}" if error.filename else ""
            print(f"error: cannot read or write{where}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    try:
        with process_settings(), options_as_flags():
            app()
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code == 130:
            _flush()
            sys.exit(interrupts.exit_status())
        if _interrupted(error) or (interrupts.received() and not isinstance(error, SystemExit)):
            _end_interrupted()
        if line := described(error):
            if speaks():
                print(f"error: {line}", file=sys.stderr, flush=True)
            sys.exit(2)
        _flush()
        raise


def _end_interrupted() -> NoReturn:
    print("interrupted; what was not complete is not kept", file=sys.stderr)
    sys.exit(interrupts.exit_status())


def _flush() -> None:
    """Flush stdout while a failure can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


def _interrupted(error: BaseException | None) -> bool:
    """Whether Ctrl-C is behind an error: typer makes a status of it, lazy imports a missing module."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


if __name__ == "__main__":
    run()
