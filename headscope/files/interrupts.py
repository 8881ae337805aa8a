"""SIGINT, SIGTERM and SIGHUP all raise KeyboardInterrupt, but never while directories are swapped."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
AGAIN = 0.02  # seconds
_received: list[int] = []


def note(number: int) -> None:
    """Record a received signal, for the exit status."""
    _received.append(number)


def received() -> bool:
    """Whether a signal was received since `listening` began."""
    return bool(_received)


def exit_status() -> int:
    """128 + the number of the first signal received: 130 for Ctrl-C (also where none is recorded), 143 for SIGTERM."""
    return 128 + (_received[0] if _received else signal.SIGINT)


def ending_signals() -> list[signal.Signals]:
    """The signals that end a command: SIGINT, and the others unless they are ignored (SIGHUP under nohup)."""
    return [number for number in SIGNALS if number == signal.SIGINT or signal.getsignal(number) is not signal.SIG_IGN]


@contextmanager
def listening() -> Iterator[None]:
    """Within the block every one of `SIGNALS` raises KeyboardInterrupt.

    SIGTERM and SIGHUP stay ignored where they were, as under nohup.
    """
    _received.clear()

    def interrupt(number: int, _: object) -> None:
        note(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in ending_signals()}
    try:
        with _raised_again():
            yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


@contextmanager
def _raised_again() -> Iterator[None]:
    """Send the signal again where Python dropped a KeyboardInterrupt, as it does in a destructor."""
    timers: list[threading.Timer] = []
    hook = sys.unraisablehook

    def dropped(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and _received:
            timers.append(threading.Timer(AGAIN, os.kill, (os.getpid(), _received[-1])))
            timers[-1].daemon = True
            timers[-1].start()
        else:
            hook(unraisable)

    sys.unraisablehook = dropped
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for timer in timers:
            timer.cancel()
            timer.join()


@contextmanager
def deferred() -> Iterator[None]:
    """Within the block signals are held back; afterwards the first one is delivered to its previous handler."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[int] = []
    before = {n: handler for n in SIGNALS if (handler := signal.getsignal(n)) not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda received, _: waiting.append(received))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if waiting:
            signal.raise_signal(waiting[0])
