"""Times of a model before and after: wall seconds, in turns, so that a machine whose pace changes slows both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch


@dataclass(frozen=True)
class Timing:
    """Median seconds of one run before and after, and their ratio; `tokens` that a run writes, where it decodes."""

    what: str
    sentences: int
    before: float
    after: float
    speedup: float
    tokens: int = 0


def measure_timing(
    what: str, sentences: int, before: Callable[[], Any], after: Callable[[], Any], rounds: int
) -> Timing:
    """Time two functions in turns, after one run of each that does not count."""
    before(), after()
    return in_turns(what, sentences, partial(_seconds, before), partial(_seconds, after), rounds)


def in_turns(
    what: str, sentences: int, before: Callable[[], float], after: Callable[[], float], rounds: int, *, tokens: int = 0
) -> Timing:
    """Medians of what two functions say that they took, one after the other in every round."""
    pairs = [(before(), after()) for _ in range(rounds)]
    old, new = (median(seconds) for seconds in zip(*pairs, strict=True))
    return Timing(what, sentences, old, new, old / new, tokens=tokens)


def _seconds(work: Callable[[], Any]) -> float:
    wait_for_device()
    start = time.perf_counter()
    work()
    wait_for_device()
    return time.perf_counter() - start


def wait_for_device() -> None:
    """Until an accelerator has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
