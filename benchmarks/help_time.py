"""CPU seconds that `--help` of every command takes, start of Python included.

Run: python benchmarks/help_time.py

The best of five runs each. Limit: 0.3 s.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import typer

from headscope.cli.main import app

LIMIT = 0.3


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command and group, by the words that call it."""
    yield path
    for name in group.list_commands(None) if hasattr(group, "list_commands") else ():
        yield from commands(group.get_command(None, name), (*path, name))


def seconds(words: tuple[str, ...]) -> float:
    """CPU seconds of one run."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "headscope", *words, "--help"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Measure and print."""
    worst = 0.0
    for words in commands(typer.main.get_command(app)):
        best = min(seconds(words) for _ in range(5))
        worst = max(worst, best)
        print(f"{' '.join(('headscope', *words)):32s} {best:.3f} s")
    print(f"slowest {worst:.3f} s (limit {LIMIT})")


if __name__ == "__main__":
    main()
