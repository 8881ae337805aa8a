"""How long work tells whoever started it how far it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Entered with what is done and how much of it there is, it gives a function to call with each step's share."""


def no_progress(what: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """Shows nothing."""
    return nullcontext(lambda count: None)
