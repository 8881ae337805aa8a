"""What comes next is made in a thread, while what came before is used."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextvars import copy_context
from queue import Full, Queue
from threading import Event, Thread
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 0.1
"""Seconds after which the thread looks whether anybody still waits for it."""


def ahead(items: Iterator[T]) -> Generator[T, None, None]:
    """The same items in the same order; the next one is made in a thread meanwhile.

    An error of `items` is raised where its item would have come. Whoever stops early ends the thread.
    """
    made: Queue[tuple[T | None, BaseException | None]] = Queue(maxsize=1)
    over = Event()

    def put(item: T | None, error: BaseException | None) -> None:
        while not over.is_set():
            try:
                return made.put((item, error), timeout=PATIENCE)
            except Full:
                continue

    def make() -> None:
        try:
            for item in items:
                put(item, None)
                if over.is_set():
                    return
        except BaseException as error:  # raised by the one who waits
            put(None, error)
        else:
            put(None, StopIteration())

    thread = Thread(target=copy_context().run, args=(make,), daemon=True)
    thread.start()
    try:
        while True:
            item, error = made.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            yield item  # type: ignore[misc]
    finally:
        over.set()
        thread.join()
