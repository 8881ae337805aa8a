"""Output of the command line: results on stdout, progress and errors on stderr."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from headscope.progress import bar, console_for_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console
    from rich.text import Text


WIDTH = 100
"""Columns in a file or a pipe."""


def out() -> Console:
    """The console for results: as wide as the terminal or COLUMNS says, and `WIDTH` where there is neither."""
    console = console_for_text()
    is_wide = console.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    return console if is_wide else console_for_text(width=WIDTH)


def show(lines: Iterable[str | Text]) -> None:
    """Print lines of text, not broken, so that what is in them can be copied whole."""
    screen = out()
    for line in lines:
        screen.print(line, soft_wrap=True)


def err() -> Console:
    """The console for progress, remarks and errors."""
    return console_for_text(stderr=True)


def say(message: str) -> None:
    """A remark on stderr."""
    err().print(message, soft_wrap=True)


def print_json(value: Any) -> None:
    """JSON on stdout; NaN and infinities, which JSON lacks, become null."""
    print(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


progress, updates = bar, partial(bar, unit="steps")
"""Progress on stderr, of sentences, and of updates or other steps."""


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """Which stage a command is in, beside a spinner on stderr; nothing where that is no terminal."""
    with err().status("") if err().is_terminal else nullcontext() as status:
        yield status.update if status else lambda stage: None
