"""What click refuses, as a ConfigError of one line that names the cause."""

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
        usage_error: Any = error
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        if type(error).__name__ == "NoSuchOption":
            from headscope.cli.mhr_options import answer

            context = usage_error.ctx
            command = context.command_path.removeprefix(f"{context.find_root().info_name} ")
            hint = _settable(usage_error) or _elsewhere(usage_error) or answer(usage_error.option_name, command)
            if hint:
                raise ConfigError(hint) from None
        see_help = "" if usage_error.ctx is None else f"; see {usage_error.ctx.command_path} --help"
        message = _too_many(usage_error) or _missing(usage_error) or one_line(usage_error.format_message()).rstrip(".")
        raise ConfigError(f"{message}{see_help}") from None


QUIET = "results go to stdout, progress and notes to stderr: add 2> /dev/null"
ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "--out": ("-o", "--output", "--output-dir", "--output_dir", "--save"),
    "--source": ("--text", "--input", "--file", "--data", "--src"),
    "--target": ("--reference", "--references", "--ref", "--tgt"),
    "--device": ("--gpu", "--cuda"),
    "CKPT": ("--model", "--checkpoint", "--ckpt", "--model-name-or-path", "--model_name_or_path"),
}
"""Options, and the argument, by the names that other programs have for them."""


def _settable(usage_error: Any) -> str:
    """What sets an option that has no flag; else nothing."""
    from headscope.cli.options import set_names

    callback, name = usage_error.ctx.command.callback, usage_error.option_name
    names = set_names(getattr(callback, "entries", ()), getattr(callback, "owners", None))
    set_name = names.get(name[2:].replace("-", "_"))
    return f"{name} has no flag of its own; give --set {set_name}=VALUE" if set_name else ""


def _elsewhere(usage_error: Any) -> str:
    """What says the same as an option that many programs have; else nothing."""
    if usage_error.option_name in ("-q", "--quiet"):
        return f"there is no {usage_error.option_name}; {QUIET}"
    parameters = usage_error.ctx.command.params
    flags = {flag for parameter in parameters for flag in parameter.opts}
    words = flags | {parameter.metavar for parameter in parameters}
    for own, synonyms in ELSEWHERE.items():
        if usage_error.option_name in synonyms and own in words:
            instead = own if own in flags else f"{own} as the first argument"
            return f"there is no {usage_error.option_name}; give {instead}" + " cuda" * (own == "--device")
    return ""


def _missing(usage_error: Any) -> str:
    """An argument or option that must be given, with what it is; else nothing."""
    if type(usage_error).__name__ != "MissingParameter" or usage_error.param is None:
        return ""
    message, about = one_line(usage_error.format_message()).rstrip("."), getattr(usage_error.param, "help", None)
    return f"{message} ({short(about).rstrip('.')})" if about else message


def _too_many(usage_error: Any) -> str:
    """What to do with a word too many: a text has an option, or comes by stdin; else nothing."""
    extra = re.search(r"unexpected extra argument(?:s|\(s\))? \((.+)\)", str(usage_error))
    if extra is None or usage_error.ctx is None:
        return ""
    flags = {flag for parameter in usage_error.ctx.command.params for flag in parameter.opts}
    words, first = extra[1], extra[1].split()[0]
    if "--source" in flags:
        return f"{words} is one argument too many; a text is given as --source {first}"
    if usage_error.ctx.command.name == "translate":
        return f"translate reads the text from stdin: {usage_error.ctx.command_path} CKPT < {first}"
    return f"{words} is one argument too many"
