"""Errors that a user can fix: the command line prints their one line and exits with status 2."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS_AS_FLAGS: ContextVar[bool] = ContextVar("headscope_options_as_flags", default=False)
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_]?)")


@contextmanager
def options_as_flags() -> Iterator[None]:
    """Within the block the API's errors write options as the command line does: `--max-length`, not `max_length`."""
    token = _OPTIONS_AS_FLAGS.set(True)
    try:
        yield
    finally:
        _OPTIONS_AS_FLAGS.reset(token)


def flags_are_kept() -> bool:
    """Whether errors write options as the command line does."""
    return _OPTIONS_AS_FLAGS.get()


def one_line(text: object) -> str:
    """A message of any program on one line, without the escape codes that colour it in a terminal."""
    return " ".join(_ESCAPES.sub("", str(text)).split())


class HeadscopeError(Exception):
    """An error that the user can fix: the message says what was given, what is allowed and what to do."""


class ConfigError(HeadscopeError):
    """A value of an option or config file is not allowed."""


def check_one_given(choices: Mapping[str, object]) -> None:
    """ConfigError unless exactly one value is not None; the keys say what to give, such as `--keep N, how many`."""
    given = sum(value is not None for value in choices.values())
    if given != 1:
        raise ConfigError(f"give {', or '.join(choices)}" + ("; not both" if given else ""))


class CheckpointError(HeadscopeError):
    """A checkpoint cannot be read, does not fit its own config, or is of an unsupported kind."""


class NumericalError(HeadscopeError):
    """A forward or backward pass gives NaN or infinite numbers; the message names the layer."""


class DataError(HeadscopeError):
    """A text, parse or frequency file is missing, broken or does not fit its companion."""


class OutputError(HeadscopeError):
    """Writing would overwrite something, or the output cannot be written."""


class TrainingError(HeadscopeError):
    """Training cannot continue: the loss is NaN or infinite."""
