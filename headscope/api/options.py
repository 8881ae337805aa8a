"""What functions of Python share: checks of arguments, errors in Python's words, reports of progress."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, TypeAlias, TypeVar

from headscope.api.library_defaults import library_defaults
from headscope.config.option import converted
from headscope.errors import ConfigError, python_errors, python_words
from headscope.progress import Progress, bar, no_progress, reported

P = ParamSpec("P")
R = TypeVar("R")
PathName = str | PathLike[str]
PLAIN: dict[str, Any] = {"bool": bool, "int": int, "float": float, "str": str, "PathName": Path}
PLAIN |= {f"{name} | None": kind | None for name, kind in PLAIN.items()}
"""Types of arguments that are checked, as annotations write them."""


def in_python(function: Callable[P, R]) -> Callable[P, R]:
    """The function, within `python_errors` and `library_defaults`; its arguments of plain types are checked first."""
    hints = inspect.get_annotations(function)
    names = list(inspect.signature(function).parameters)

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        def checked(name: str, value: Any) -> Any:
            kind = PLAIN.get(hints.get(name, ""))
            return value if kind is None else converted(name, kind, value)

        with python_errors():
            values: Any = [checked(name, value) for name, value in zip(names, args, strict=False)]
            keywords: Any = {name: checked(name, value) for name, value in kwargs.items()}
            with library_defaults():
                return function(*values, **keywords)

    return wrapped


Report: TypeAlias = "bool | Callable[[str, int, int], object]"
"""True shows a bar; a function is called as `report(what, done, total)`."""


def progress_of(report: Report) -> Progress:
    """The `Progress` for a `progress` argument; ConfigError for another type."""
    if callable(report):
        return reported(report)
    if not isinstance(report, bool):
        raise ConfigError(f"progress={report!r} is not known; give True, False or a function of (what, done, total)")
    return bar if report else no_progress


class TrainingReport:
    """A training listener that reports progress in updates; a context manager."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._stack = progress, ExitStack()
        self._step: Callable[[int], None] | None = None
        self._done = 0

    def __enter__(self) -> TrainingReport:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def updated(self, run: Any, sums: Any) -> None:
        """After every update."""
        position = run.position
        if self._step is None:
            self._step = self._stack.enter_context(self._progress("training", position.planned_length or 0))
        self._step(position.update - self._done)
        self._done = position.update

    def validated(self, run: Any, validation: Any, *, best: bool) -> None:
        """Called after every validation; progress does not change."""

    def remarked(self, text: str) -> None:
        """A remark of the training becomes a Python warning."""
        warnings.warn(python_words(text), stacklevel=2)
