"""Usage errors of click as a ConfigError of one line that names the cause."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headscope.cli.failures import USAGE, short
from headscope.errors import ConfigError, one_line


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turns click's usage errors into a ConfigError of one line; `--help` is not touched.

    For an option of the MHR fork or of fairseq the message names the option of headscope.
    """
    try:
        yield
    except USAGE as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        counterpart = _counterpart(error) if type(error).__name__ == "NoSuchOption" else None
        raise ConfigError(counterpart or _complaint(error)) from None


QUIET = "results go to stdout, progress and notes to stderr: add 2> /dev/null"
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "--out": ("-o", "--output", "--output-dir", "--output_dir", "--save"),
    "--source": ("--text", "--input", "--file", "--data", "--src"),
    "--target": ("--reference", "--references", "--ref", "--tgt"),
    "--device": ("--gpu", "--cuda"),
    "CKPT": ("--model", "--checkpoint", "--ckpt", "--model-name-or-path", "--model_name_or_path"),
}
"""Options, and the argument, by the names that other programs have for them."""


def _counterpart(usage_error: Any) -> str | None:
    """The counterpart of an unknown option; None if there is none."""
    from headscope.cli.mhr_options import answer
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
    for own, synonyms in ELSEWHERE.items():
        if name in synonyms and own in words:
            instead = own if own in flags else f"{own} as the first argument"
            return f"there is no {name}; give {instead}" + " cuda" * (own == "--device")
    return answer(name, context.command_path.removeprefix(f"{context.find_root().info_name} "))


def _complaint(usage_error: Any) -> str:
    """The message for a usage error: the fault, the missing option, or the use of a superfluous word."""
    message, context = one_line(usage_error.format_message()).rstrip("."), usage_error.ctx
    if type(usage_error).__name__ == "MissingParameter" and (about := getattr(usage_error.param, "help", None)):
        message += f" ({short(about).rstrip('.')})"
    if context is None:
        return message
    if extra := re.search(r"unexpected extra argument(?:s|\(s\))? \((.+)\)", message):
        message, text = f"{extra[1]} is one argument too many", extra[1].split()[0]
        if any("--source" in parameter.opts for parameter in context.command.params):
            message += f"; a text is given as --source {text}"
        elif context.command.name == "translate":
            message = f"translate reads the text from stdin: {context.command_path} CKPT < {text}"
    return f"{message}; see {context.command_path} --help"
