"""Errors that a user can fix: the command line prints their one line and exits with status 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

# C0 without tab and line feed, delete, C1; line separators; marks of direction; surrogates, which no UTF-8 can hold.
_CONTROL_CHARACTERS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def python_keyword(name: str, value: object = None) -> str:
    """An option as a keyword of Python: `max_length`, with a value `max_length=9`; `--source` is `text`."""
    keyword = "text" if name == "source" else name
    return keyword if value is None else f"{keyword}={value}"


def command_flag(name: str, value: object = None) -> str:
    """An option as a flag of a command: `--max-length`, with a value `--max-length 9`, with False `--no-bcd`."""
    words = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
    return words if value is None or value is False else f"{words} {value}"


class Flag:
    """Spells options in messages as the front end in use does: `flag.max_length`, `flag("keep", 3)`.

    The spelling belongs to the whole process, as any thread may raise an error.
    """

    _spell: Callable[[str, object], str] = staticmethod(python_keyword)

    def __call__(self, name: str, value: object = None) -> str:
        return self._spell(name, value)

    def __getattr__(self, name: str) -> str:
        return self(name)

    @contextmanager
    def spelling(self, spell: Callable[[str, object], str] | None = None, **others: str) -> Iterator[None]:
        """Within the block `spell` spells options, and `others` replaces their names: `margin="max_drop"`."""
        before = self._spell
        new_spell = spell or before
        self._spell = lambda name, value: new_spell(others.get(name, name), value)
        try:
            yield
        finally:
            self._spell = before


flag = Flag()


def flags(*names: str) -> str:
    """Several options in a message: `--clean, --corrupt and --answer`."""
    *leading, last = map(flag, names)
    return f"{', '.join(leading)} and {last}" if leading else last


def one_line(text: object) -> str:
    """A message of any program in one line, with nothing in it that a terminal would obey."""
    return printable(" ".join(str(text).split()))


def reason_of(error: BaseException, *, max_length: int = 160) -> str:
    """An error of another program in one line: its message, or its class if it has none."""
    return one_line(error)[:max_length] or type(error).__name__


def shortlist(names: Sequence[str], *, max_names: int = 3) -> str:
    """The first names of a list, and how many more there are: `a, b, c and 5 more`."""
    return ", ".join(names[:max_names]) + (f" and {len(names) - max_names} more" if len(names) > max_names else "")


def printable(text: str) -> str:
    """The text with everything that a terminal would obey written out: `\\x1b` for an escape."""
    return _CONTROL_CHARACTERS.sub(lambda match: repr(match[0])[1:-1], text)


class HeadscopeError(Exception):
    """An error that the user can fix: the message says what was given, what is allowed and what to do."""


class ConfigError(HeadscopeError):
    """A value of an option or config file is not allowed."""


@contextmanager
def restate(to: type[HeadscopeError], message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Within the block errors of some kinds (default: ConfigError) become `to`; `{why}` in `message` is their text."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, kinds or ConfigError):
            raise
        is_ours = isinstance(error, HeadscopeError)
        raise to(message.replace("{why}", str(error) if is_ours else reason_of(error))) from (
            None if is_ours else error
        )


def raise_first(kind: type[HeadscopeError], problems: Mapping[str, object], prefix: str = "") -> None:
    """Raise an error with the first problem whose value is true, after a prefix."""
    for problem, is_present in problems.items():
        if is_present:
            raise kind(f"{prefix}{problem}")


def check_one_given(choices: Mapping[str, object]) -> None:
    """ConfigError unless exactly one value is not None; its message lists the keys, such as `--keep N, how many`."""
    count = sum(value is not None for value in choices.values())
    if count != 1:
        raise ConfigError(f"give {', or '.join(choices)}" + ("; not both" if count else ""))


class CheckpointError(HeadscopeError):
    """A checkpoint cannot be read, does not fit its own config, or is of an unsupported kind."""


class NumericalError(HeadscopeError):
    """A forward or backward pass gives NaN or infinite numbers; the message names the layer."""


class HeadscopeWarning(UserWarning):
    """A warning before the work begins: one line, which commands print to stderr."""


class QuestionWarning(HeadscopeWarning):
    """The result answers another question than the user likely meant."""


class CheckpointWarning(HeadscopeWarning):
    """Opening a checkpoint rests on an assumption that may be wrong."""


class DataError(HeadscopeError):
    """A text, parse or frequency file is missing, broken or does not fit its companion."""


class OutputError(HeadscopeError):
    """Writing would overwrite something, or the output cannot be written."""


class TrainingError(HeadscopeError):
    """Training cannot continue: the loss is NaN or infinite."""
