"""The `progress` argument of the API: False (silent), True (a bar), or a callback."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeAlias

from headscope.api.options import python_words
from headscope.errors import ConfigError
from headscope.progress import Progress, bar, no_progress, reported

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
            totals = [position.updates_planned] if position.updates_planned else []
            if position.epochs_planned and position.updates_per_epoch:
                totals.append(position.epochs_planned * position.updates_per_epoch)
            self._step = self._stack.enter_context(self._progress("training", min(totals, default=0)))
        self._step(position.update - self._done)
        self._done = position.update

    def validated(self, run: Any, validation: Any, *, best: bool) -> None:
        """Called after every validation; progress does not change."""

    def remarked(self, text: str) -> None:
        """A remark of the training becomes a Python warning."""
        warnings.warn(python_words(text), stacklevel=2)
