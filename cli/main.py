"""The `headscope` command; heavy libraries are imported inside its sub-commands."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, NoReturn

import typer

from headscope.cli.error_messages import usage_errors, user_message
from headscope.cli.lazy_commands import PLAIN, LazyGroup, build_command
from headscope.errors import HeadscopeWarning, command_flag, flag, one_line
from headscope.files.writing import exit_status, listening, received_signals

COMMANDS = {
    "show": "Print what a checkpoint is, its heads, what removing them can save, and what can be measured.",
    "list": "List what there is of one kind (analyses, criteria, metrics …), and what of it fits a checkpoint.",
    "analyze": "Measure every attention head of a checkpoint on a text, in one forward pass.",
    "train": "Train a Transformer, plain or in one of the variants, on raw parallel text or as a language model.",
    "plot": "Draw figures from the files of finished runs.",
    "prune": "Take heads out of a model, and prove that nothing else changed.",
    "evaluate": "Score translations, how well the model predicts a text, or how near it is to the intact one.",
    "translate": "Translate: headscope translate CKPT < text > text. Empty lines stay empty.",
    "convert": "Write a fairseq, MHR, story-of-heads or native Transformer for Hugging Face, fairseq or headscope.",
    "demo": "See what headscope does, on a pretrained BERT and a small translation model; needs no network.",
}
"""The first line of each command's help."""
OWN_MODULE = ("list", "analyze", "train", "plot", "prune", "demo")
"""Commands with a module of their name; the others are in `commands`."""
GROUPS = ("train", "plot", "prune")
SHARED = ("analyze", "train", "prune", "evaluate", "translate")
"""Commands that torchrun may run in several processes; of `prune` some methods only."""

EPILOG = """\
\b
Start here:  headscope demo
Your own:    headscope show CKPT
             headscope analyze CKPT --source text.en --out run
             headscope plot heads run --out heads.pdf"""


def command_of(name: str) -> Any:
    """The command of a name, or the group of commands, from its module."""
    module = import_module(f"headscope.cli.{name if name in OWN_MODULE else 'commands'}")
    return module.group(help=COMMANDS[name]) if name in GROUPS else build_command(getattr(module, name), name)


class Commands(LazyGroup):
    """The commands of headscope, with usage errors in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(COMMANDS, command_of, shared=SHARED, **settings)

    def make_context(self, info_name: str | None, args: list[str], *extra_args: Any, **options: Any) -> Any:
        """The context of the whole command line, as typer makes it; ConfigError for usage errors."""
        with usage_errors():
            return super().make_context(info_name, args, *extra_args, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the rest of the command line and run the command."""
        try:
            with usage_errors():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            _end_interrupted()


app = typer.Typer(cls=Commands, name="headscope", epilog=EPILOG, no_args_is_help=True, **PLAIN)


def _version(wants_version: bool) -> None:
    if wants_version:
        from headscope.version import VERSION

        print(f"headscope {VERSION}")
        raise typer.Exit


@app.callback()
def main(
    version: bool = typer.Option(
        False, "--version", help="Print the version and end.", callback=_version, is_eager=True
    ),
) -> None:
    """What the attention heads of a trained Transformer do, how much each one matters, and which can go."""


OPENMP_WAIT = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"}
"""Makes idle threads of OpenMP sleep soon; torch reads it when it is imported.

Spinning threads delay the others where another process keeps a core busy.
"""
ONEDNN_CACHE = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
"""Limits the kernels that oneDNN keeps, one for each shape of a batch; its default of 1,024 makes the heap grow."""


def set_environment() -> None:
    """Set `OPENMP_WAIT` and `ONEDNN_CACHE`, unless the user has set such variables."""
    if not any(name in os.environ for name in (*OPENMP_WAIT, "OMP_WAIT_POLICY", "KMP_LIBRARY")):
        os.environ.update(OPENMP_WAIT)
    os.environ.setdefault(*ONEDNN_CACHE)


def run() -> None:
    """Entry point. Exit status: 2 with one line for errors that the user can fix, 130 for Ctrl-C, 143 for SIGTERM."""
    try:
        with listening():
            _run()
    except KeyboardInterrupt:  # before the command began or after it ended
        _end_interrupted()
    except OSError as error:  # unexpected, or stdout cannot be written
        sys.stdout = None  # else Python flushes it again at exit, and prints a second error
        if not isinstance(error, BrokenPipeError):
            path = f" {error.filename}" if error.filename else ""
            print(f"error: {one_line(f'cannot read or write{path}: {error.strerror or error}')}", file=sys.stderr)
        sys.exit(2)


def _run() -> None:
    try:
        with flag.spelling(command_flag), warnings.catch_warnings():
            set_environment()
            warnings.showwarning = partial(_show_warning, warnings.showwarning, set())
            app()
    except SystemExit as end:
        _flush()
        sys.exit(exit_status() if end.code == 130 else end.code)
    except BaseException as error:
        if received_signals or isinstance(error, KeyboardInterrupt):  # an interrupted import may raise anything
            _end_interrupted()
        if line := user_message(error):
            print(f"error: {line}", file=sys.stderr, flush=True)
            sys.exit(2)
        _flush()
        raise


def _show_warning(
    fallback: Callable[..., Any], shown_lines: set[str], message: Warning | str, category: type[Warning], *extra: Any
) -> None:
    """Print headscope's own warnings in one line, each once, and other warnings by `fallback`."""
    if issubclass(category, HeadscopeWarning):
        if (line := one_line(message)) not in shown_lines:
            shown_lines.add(line)
            print(line, file=sys.stderr, flush=True)
    else:
        fallback(message, category, *extra)


def _end_interrupted() -> NoReturn:
    print("interrupted; what was not complete is not kept", file=sys.stderr)
    sys.exit(exit_status())


def _flush() -> None:
    """Flush stdout while a failure can still be reported."""
    if sys.stdout is not None:
        sys.stdout.flush()


if __name__ == "__main__":
    run()
