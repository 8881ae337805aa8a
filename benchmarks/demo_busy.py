"""What a neighbour costs: the demonstration beside a process that keeps one core busy, as a multiple of its idle time.

Run: python benchmarks/demo_busy.py [--rounds N] [--threads N] [--spinning]

`headscope demo` runs alone and beside the busy process in turns; the best round of each counts, in wall seconds.
CPU seconds and context switches (rather waiting, and made to wait) are of the demonstration's process alone: threads
that wait for each other show there first. `--spinning` gives OpenMP's threads their default way of waiting back, which
commands replace (`headscope.cli.main.set_environment`): the difference in CPU seconds is time spent waiting.
Runs on two cores, whatever there are, and needs them idle but for this. Limits with two cores: 60 s alone, ratio 3.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LIMIT, LONGEST = 3.0, 60.0
CORES = 2
SPINNING = {"GOMP_SPINCOUNT": "300000"}  # libgomp's own number
IDLE = 0.5  # load of the last minute above which a machine is called busy


class Usage(NamedTuple):
    """Wall and CPU seconds of a run, and its context switches."""

    wall: float
    cpu: float
    voluntary: int
    involuntary: int

    def __str__(self) -> str:
        return f"{self.wall:.1f} s, CPU {self.cpu:.1f} s, {self.voluntary} and {self.involuntary} context switches"


@contextmanager
def busy_core() -> Iterator[None]:
    """A process that does nothing but run, within the block."""
    neighbour = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def demonstrate(out: Path, threads: int | None, *, spinning: bool = False) -> Usage:
    """Run the demonstration; `threads` None: as many as torch takes."""
    environment = {**os.environ, **(SPINNING if spinning else {})}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    command = [sys.executable, "-m", "headscope", "demo", "--out", str(out), "--force"]
    start = time.perf_counter()
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(errors.decode())
    return Usage(wall, usage.ru_utime + usage.ru_stime, usage.ru_nvcsw, usage.ru_nivcsw)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--threads", type=int, help="OMP_NUM_THREADS; default: not set")
    parser.add_argument("--spinning", action="store_true", help="OpenMP's default way of waiting")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])  # the processes begun here inherit it
    if os.getloadavg()[0] > IDLE:
        print(f"the load was {os.getloadavg()[0]:.1f} before this began: other work is in the figures", file=sys.stderr)
    alone, busy = [], []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.rounds):
            alone.append(demonstrate(Path(folder) / "demo", args.threads, spinning=args.spinning))
            print(f"alone: {alone[-1]}", flush=True)
            with busy_core():
                busy.append(demonstrate(Path(folder) / "demo", args.threads, spinning=args.spinning))
            print(f"beside a busy process: {busy[-1]}", flush=True)
    ratio = min(busy).wall / min(alone).wall
    alone_best = min(alone).wall
    print(
        f"{CORES} of {os.cpu_count()} cores, threads {args.threads or 'not set'}: {alone_best:.1f} s "
        f"(limit {LONGEST:g}), ratio {ratio:.2f} (limit {LIMIT:g})"
    )


if __name__ == "__main__":
    main()
