"""The errors a user can fix. The command line prints their one line and exits with status 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_OPTIONS_AS_FLAGS: ContextVar[bool] = ContextVar("headscope_options_as_flags", default=False)


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


class HeadscopeError(Exception):
    """Something the user can fix: the message says what came, what is allowed and what to do next."""


class ConfigError(HeadscopeError):
    """An option or a config file holds something that is not allowed."""


class CheckpointError(HeadscopeError):
    """A checkpoint cannot be read, does not fit its own config, or is of an unsupported kind."""


class NumericalError(HeadscopeError):
    """NaN or infinite numbers arise while a model runs; the message names the layer."""


class DataError(HeadscopeError):
    """A text, parse or frequency file is missing, broken or does not fit its companion."""


class OutputError(HeadscopeError):
    """Writing would overwrite something, or the place to write to cannot be used."""


class TrainingError(HeadscopeError):
    """Training cannot go on: the loss is no number."""
