"""Peak memory of `headscope analyze` on 2,000 and on 20,000 sentences: it must not grow with the corpus.

Run: python benchmarks/memory.py SOURCE

SOURCE needs 20,000 lines. Each size runs in a process of its own with all default analyses; the figure is
the largest resident set of that process. Limit: 1.1 times.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from headscope.assets import demo_checkpoint

LIMIT = 1.1
SMALL, LARGE = 2_000, 20_000


def peak(source: Path, sentences: int) -> float:
    """MiB that a run over the first `sentences` lines needs at most."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "headscope", "analyze", demo_checkpoint(), "--source", str(source)]
        options = ["--max-sentences", str(sentences), "--out", f"{folder}/run", "--no-figures", "--device", "cpu"]
        process = subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the run over {sentences} sentences ended with status {status}")
        return usage.ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    source = parser.parse_args().source
    small, large = peak(source, SMALL), peak(source, LARGE)
    print(f"{SMALL} sentences: {small:.0f} MiB; {LARGE} sentences: {large:.0f} MiB")
    print(f"ratio {large / small:.3f} (limit {LIMIT})")


if __name__ == "__main__":
    main()
