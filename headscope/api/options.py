"""What functions of Python share: errors in Python's words, reports of progress."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from os import PathLike
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from headscope.errors import ConfigError, python_errors, spelled
from headscope.progress import Progress, bar, no_progress, reported

P = ParamSpec("P")
R = TypeVar("R")
PathName = str | PathLike[str]


def public_api(function: Callable[P, R]) -> Callable[P, R]:
    """The function, whose errors name options as Python does, and which has gradients whatever surrounds it."""

    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with python_errors(), torch.inference_mode(False), torch.enable_grad():
            return function(*args, **kwargs)

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
        warnings.warn(spelled(text), stacklevel=2)
