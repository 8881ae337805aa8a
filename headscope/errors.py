"""Errors that a user can fix: the command line prints their one line and exits with status 2."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

# C0 without tab and line feed, delete, C1; line separators; marks of direction; surrogates, which no UTF-8 can hold.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def python_keyword(name: str, value: object = None) -> str:
    """An option as Python has it: `max_length`, with a value `max_length=9`; `--source` is `text`."""
    keyword = "text" if name == "source" else name
    return keyword if value is None else f"{keyword}={value}"


def command_flag(name: str, value: object = None) -> str:
    """An option as the command line has it: `--max-length`, with a value `--max-length 9`; of False `--no-bcd`."""
    words = f"--{'no-' * (value is False)}{name.replace('_', '-')}"
    return words if value is None or value is False else f"{words} {value}"


class Flag:
    """Options in messages, in words of the front end that is in use: `flag.max_length`, `flag("keep", 3)`.

    The front end is the whole process's: messages come from any thread.
    """

    _spell: Callable[[str, object], str] = staticmethod(python_keyword)

    def __call__(self, name: str, value: object = None) -> str:
        return self._spell(name, value)

    def __getattr__(self, name: str) -> str:
        return self(name)

    @contextmanager
    def spelling(self, spell: Callable[[str, object], str] | None = None, **others: str) -> Iterator[None]:
        """Within the block options are spelled so, and called as `others`: `margin="max_drop"`."""
        before = self._spell
        usual = spell or before
        self._spell = lambda name, value: usual(others.get(name, name), value)
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
    return _COMMANDS.sub(lambda match: repr(match[0])[1:-1], text)


class HeadscopeError(Exception):
    """An error that the user can fix: the message says what was given, what is allowed and what to do."""


class ConfigError(HeadscopeError):
    """A value of an option or config file is not allowed."""


@contextmanager
def restate(to: type[HeadscopeError], message: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of some kinds within the block (default: ConfigError) as another, in whose message `{why}` is theirs."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, kinds or ConfigError):
            raise
        is_ours = isinstance(error, HeadscopeError)
        raise to(message.replace("{why}", str(error) if is_ours else reason_of(error))) from (
            None if is_ours else error
        )


def raise_first(kind: type[HeadscopeError], problems: Mapping[str, object], about: str = "") -> None:
    """An error with the first problem that there is, behind `about`; the values say which there are."""
    for problem, present in problems.items():
        if present:
            raise kind(f"{about}{problem}")


def check_one_given(choices: Mapping[str, object]) -> None:
    """ConfigError unless exactly one value is not None; the keys say what to give, such as `--keep N, how many`."""
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
    """Another question is answered than was likely meant."""


class CheckpointWarning(HeadscopeWarning):
    """A warning about an assumption that opening a checkpoint took."""


class DataError(HeadscopeError):
    """A text, parse or frequency file is missing, broken or does not fit its companion."""


class OutputError(HeadscopeError):
    """Writing would overwrite something, or the output cannot be written."""


class TrainingError(HeadscopeError):
    """Training cannot continue: the loss is NaN or infinite."""
