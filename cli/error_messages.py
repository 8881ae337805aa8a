"""Messages of errors that the user can fix, in one line; usage errors of click become a ConfigError."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer

from headscope.cli.lazy_commands import short_help
from headscope.errors import ConfigError, HeadscopeError, one_line
from headscope.files.writing import write_failure

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


@contextmanager
def usage_errors() -> Iterator[None]:
    """Within the block usage errors of click become a ConfigError in one line.

    For an option of another program (the MHR fork, fairseq) the message names the option of headscope.
    """
    try:
        yield
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # click then prints the help
            raise
        counterpart = _counterpart(error) if type(error).__name__ == "NoSuchOption" else None
        raise ConfigError(counterpart or _complaint(error)) from None


QUIET = "results go to stdout, progress and notes to stderr: add 2> /dev/null"
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "--out": ("-o", "--output", "--output-dir", "--output_dir", "--save"),
    "--source": ("--text", "--input", "--file", "--data", "--src"),
    "--target": ("--reference", "--references", "--ref", "--tgt"),
    "--device": ("--gpu", "--cuda"),
    "CKPT": ("--model", "--checkpoint", "--ckpt", "--model-name-or-path", "--model_name_or_path"),
}
"""What other programs call an option or the argument of headscope."""


def _counterpart(usage_error: Any) -> str | None:
    """The message that names the headscope option for an unknown option; None if there is none."""
    from headscope.cli.mhr_options import counterpart_message
    from headscope.cli.options import set_names

    name, context = usage_error.option_name, usage_error.ctx
    callback, parameters = context.command.callback, context.command.params
    set_option = set_names(getattr(callback, "entries", ()), getattr(callback, "owners", None))
    if set_name := set_option.get(name[2:].replace("-", "_")):
        return f"{name} has no flag of its own; give --set {set_name}=VALUE"
    if name in ("-q", "--quiet"):
        return f"there is no {name}; {QUIET}"
    flags = {flag for parameter in parameters for flag in parameter.opts}
    words = flags | {parameter.metavar for parameter in parameters}
    for option, synonyms in SYNONYMS.items():
        if name in synonyms and option in words:
            instead = option if option in flags else f"{option} as the first argument"
            return f"there is no {name}; give {instead}" + " cuda" * (option == "--device")
    return counterpart_message(name, context.command_path.removeprefix(f"{context.find_root().info_name} "))


def _complaint(usage_error: Any) -> str:
    """The message for a usage error: click's own, with help on a missing option or a superfluous argument."""
    message, context = one_line(usage_error.format_message()).rstrip("."), usage_error.ctx
    if type(usage_error).__name__ == "MissingParameter" and (about := getattr(usage_error.param, "help", None)):
        message += f" ({short_help(about).rstrip('.')})"
    if context is None:
        return message
    if extra := re.search(r"unexpected extra argument(?:s|\(s\))? \((.+)\)", message):
        message, text = f"{extra[1]} is one argument too many", extra[1].split()[0]
        if any("--source" in parameter.opts for parameter in context.command.params):
            message += f"; a text is given as --source {text}"
        elif context.command.name == "translate":
            message = f"translate reads the text from stdin: {context.command_path} CKPT < {text}"
    return f"{message}; see {context.command_path} --help"
