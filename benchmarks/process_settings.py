"""What headscope's settings of the process are worth: glibc's allocator, oneDNN's kernels, torch's threads.

Run: python benchmarks/process_settings.py SOURCE [--sentences N] [--rounds N]

The commands run with a setting and without it in turns; the best round of each counts. A setting stays in headscope
where it saves at least 5 % of the time, or keeps memory flat.

- allocator: `headscope analyze` of a BERT over the first lines of SOURCE with all default analyses, seconds and MiB;
  off by naming glibc's own threshold in MALLOC_TRIM_THRESHOLD_, which headscope leaves alone.
- kernels: the same, MiB over 4 × as many lines; off by naming oneDNN's own number of kernels.
- waiting: `headscope demo` beside a process that keeps a core busy, seconds; off by naming libgomp's own number of
  spins, with which threads without work keep their core.
- threads: `headscope demo` beside a process that keeps a core busy, seconds; off by taking every product for large.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from demo_busy import SPINNING, busy_core

from headscope.assets import demo_checkpoint

START = "from headscope.cli.main import run; run()"
ALL_THREADS = f"from headscope.model import threads; threads.LARGE = 0; {START}"
DEFAULTS = {"allocator": {"MALLOC_TRIM_THRESHOLD_": "131072"}, "kernels": {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024"}}


class Cost(NamedTuple):
    """Wall seconds, and the largest resident set in MiB."""

    seconds: float
    memory: float


def cost(command: list[str], *, code: str = START, environment: dict[str, str] | None = None) -> Cost:
    """Run a command of headscope in a process of its own."""
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", code, *command],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} ended with status {status}")
    return Cost(time.perf_counter() - begun, usage.ru_maxrss / 1024)


def best(costs: list[Cost]) -> Cost:
    """The quickest round's seconds and the smallest round's memory."""
    return Cost(min(each.seconds for each in costs), min(each.memory for each in costs))


def compared(name: str, with_it: list[Cost], without: list[Cost]) -> str:
    """A line of the result."""
    on, off = best(with_it), best(without)
    return (
        f"{name}: with it {on.seconds:.1f} s and {on.memory:.0f} MiB, without it {off.seconds:.1f} s and "
        f"{off.memory:.0f} MiB; time × {off.seconds / on.seconds:.2f}, memory × {off.memory / on.memory:.2f}"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        analyze = ["analyze", demo_checkpoint(), "--source", str(given.source), "--no-figures", "--device", "cpu"]
        analyze += ["--out", f"{folder}/run", "--force", "--max-sentences"]
        for name, environment in DEFAULTS.items():
            command = [*analyze, str(given.sentences * (4 if name == "kernels" else 1))]
            rounds = [(cost(command), cost(command, environment=environment)) for _ in range(given.rounds)]
            print(compared(name, [on for on, _ in rounds], [off for _, off in rounds]), flush=True)
        demo = ["demo", "--out", f"{folder}/demo", "--force"]
        with busy_core():
            pairs = [(cost(demo), cost(demo, code=ALL_THREADS)) for _ in range(given.rounds)]
            spins = [(cost(demo), cost(demo, environment=SPINNING)) for _ in range(given.rounds)]
        print(compared("threads", [on for on, _ in pairs], [off for _, off in pairs]), flush=True)
        print(compared("waiting", [on for on, _ in spins], [off for _, off in spins]), flush=True)


if __name__ == "__main__":
    main()
