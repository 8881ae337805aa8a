"""What functions of Python share: errors in Python's words, reports of progress."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from inspect import isfunction
from os import PathLike
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch

from headscope.errors import ConfigError, python_errors, spelled
from headscope.progress import Progress, bar, no_progress, reported

C = TypeVar("C")
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


def public_methods(cls: type[C]) -> type[C]:
    """The class, whose own methods without an underscore, and its call, are `public_api`."""
    for name, method in list(vars(cls).items()):
        if isfunction(method) and (not name.startswith("_") or name == "__call__"):
            setattr(cls, name, public_api(method))
    return cls


Report: TypeAlias = "bool | Callable[[str, int, int], object]"
"""True shows a bar; a function is called as `report(what, done, total)`."""


def progress_of(report: Report) -> Progress:
    """The `Progress` for a `progress` argument; ConfigError for another type."""
    if callable(report):
        return reported(report)
    if not isinstance(report, bool):
        raise ConfigError(f"progress={report!r} is not known; give True, False or a function of (what, done, total)")
    return bar if report else no_progress


class TrainingReport(ExitStack):
    """A listener of training that reports progress in updates, and remarks as warnings."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress, self._updates = progress, 0
        self._step: Callable[[int], None] | None = None

    def updated(self, run: Any, sums: Any) -> None:
        """After every update."""
        position = run.position
        self._step = self._step or self.enter_context(self._progress("training", position.planned_length or 0))
        self._step(position.update - self._updates)
        self._updates = position.update

    def validated(self, run: Any, validation: Any, *, best: bool) -> None:
        """After every validation."""

    def remarked(self, text: str) -> None:
        """A remark of the training."""
        warnings.warn(spelled(text), stacklevel=2)
