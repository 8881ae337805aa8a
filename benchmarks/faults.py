"""Is anything half, or lost, after a command was killed? And after two processes wrote to one output?

    python benchmarks/faults.py [--kills 4] [--seed 1] [--case NAME …]

Every command that writes (`tests/faults/cases.py`; `demo` with few sentences) runs in a process of its own,
forked from this one, which has everything in memory. For every command some processes are killed at random moments,
by SIGTERM, SIGKILL and SIGINT in turn, on an empty place and, with `--force`, over a complete run. After SIGTERM and
SIGINT the status must be 143 and 130, no temporary file may be left, and a new output must be absent, complete, or
resumable. After every signal the older run must be as it was (or the new one complete), and the command, with
`--resume` where it has that, must then do its work and leave nothing else. Last, two processes start on one place at
once: one may be refused, and the result must be whole.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from headscope.cli import main as command_line  # noqa: E402
from tests.faults import cases  # noqa: E402
from tests.faults.cases import Case  # noqa: E402

SIGNALS = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}


def main() -> None:
    """Run the study; exit status 1 if anything was half or lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="of every command")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", action="append", default=[], metavar="NAME")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="headscope-faults-"))
    try:
        result = Study(folder, random.Random(args.seed)).run(args.kills, args.case)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    sys.exit(1 if result["problems"] else 0)


class Study:
    """All commands, their durations and outputs without a fault, and the problems."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.inputs = folder / "inputs"
        self.problems: list[str] = []
        self.count = {"kills": 0, "landed": 0, "over a run": 0, "two at once": 0, "refused": 0}
        self.signals = cycle(SIGNALS)

    def run(self, kills: int, only: list[str]) -> dict[str, Any]:
        """Kill every command `kills` times, and start it twice at once."""
        self.inputs.mkdir()
        cases.prepare(self.inputs)
        run(cases.CASES["analyze"].command(self.inputs, self.inputs / "run"))  # plot draws it; and all is imported
        for name, case in cases.CASES.items():
            if not only or name in only:
                self.case(case, kills)
            print(name, self.count, *self.problems, file=sys.stderr)
        return {"commands": len(only or cases.CASES), **self.count, "problems": self.problems}

    def case(self, case: Case, kills: int) -> None:
        """One command."""
        folder = self.empty()
        start = time.monotonic()
        self.expect(wait(self.start(case, folder)) == 0, f"{case.name} does not work")
        duration, files = time.monotonic() - start, set(cases.digests(case.output_path(folder)))
        for kill in range(kills):
            self.kill(case, duration, files, over=kill % 2 == 1)
        folder = self.empty()
        pair = [self.start(case, folder) for _ in range(2)]
        statuses = [wait(child) for child in pair]
        self.count["two at once"] += 1
        self.count["refused"] += statuses.count(2)
        is_fine = 0 in statuses and set(statuses) <= {0, 2}
        self.expect(is_fine and self.is_complete(case, folder, files), f"{case.name} twice at once: {statuses}")

    def kill(self, case: Case, duration: float, files: set[str], *, over: bool) -> None:
        """One kill, and the command again."""
        number, moment, folder = next(self.signals), self.chance.uniform(0, duration), self.empty()
        label = f"{case.name} {'--force ' if over else ''}{number.name} after {moment:.2f} s"
        out = case.output_path(folder)
        if over:
            self.expect(wait(self.start(case, folder)) == 0, f"{label}: the older run")
        before = cases.digests(out)
        child = self.start(case, folder, *(["--force"] if over else []))
        time.sleep(moment)
        os.kill(child, number)
        status = wait(child)
        self.count["kills"] += 1
        self.count["landed"] += status != 0
        self.count["over a run"] += over
        self.expect(status in (0, STATUS[number]), f"{label}: status {status}")
        if number != signal.SIGKILL:
            self.expect(not (temporary := cases.leftovers(folder)), f"{label}: left {temporary}")
        if over:
            intact = cases.digests(out) == before or set(cases.digests(out)) == files
            self.expect(intact, f"{label}: the older run is not as it was")
        elif number != signal.SIGKILL or case.name not in ("analyze", "figures"):
            self.expect((fault := cases.find_partial(case, folder, files)) is None, f"{label}: half output, {fault}")
        self.expect(self.repeat(case, folder), f"{label}: does not go on")
        self.expect(self.is_complete(case, folder, files), f"{label}: goes on to {sorted(cases.digests(out))}")

    def repeat(self, case: Case, folder: Path) -> bool:
        """The command once more; with --resume, or --force for what is complete or says that it is not."""
        ways: list[list[str]] = [[], *([["--resume"]] if case.resumes else []), ["--force"]]
        return any(wait(self.start(case, folder, *way)) == 0 for way in ways)

    def is_complete(self, case: Case, folder: Path, files: set[str]) -> bool:
        """Whether the output is complete and there is nothing else."""
        extra = [] if case.suffix else cases.leftovers(folder)  # SIGKILL may leave the temporary name of a single file
        return set(cases.digests(case.output_path(folder))) == files and not extra

    def start(self, case: Case, folder: Path, *options: str) -> int:
        """Start the command in a process of its own; its id."""
        return fork_command(case.command(self.inputs, case.output_path(folder), *options))

    def empty(self) -> Path:
        """A new directory."""
        return Path(tempfile.mkdtemp(dir=self.folder))

    def expect(self, fine: bool, problem: str) -> None:
        """Note a problem unless `fine`."""
        if not fine:
            self.problems.append(problem)


def run(arguments: list[str]) -> int:
    """A command in this process; its exit status."""
    sys.argv = ["headscope", *arguments]
    try:
        command_line.run()
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def fork_command(arguments: list[str]) -> int:
    """The id of a child process that runs a command, its output thrown away."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # a signal waits until the child can end by itself
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return child
    code = 1
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        code = run(arguments)
    except KeyboardInterrupt:  # before the command listened
        code = 130
    finally:
        os._exit(code)


def wait(child: int) -> int:
    """The exit status of a process; that of one which SIGTERM ended before it listened is as if it had."""
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return 128 - status if status in (-signal.SIGTERM, -signal.SIGINT) else status


if __name__ == "__main__":
    main()
