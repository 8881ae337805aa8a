"""Opens mutations of a checkpoint in a process of its own, with a ceiling on memory and on time.

Run as a script: the checkpoint's path, a folder to work in, and the number of mutations, for one checkpoint after the
other. Prints one JSON object for each: how often a mutation gave equal results or a one-line error, and everything else
that happened.
"""

from __future__ import annotations

import json
import random
import resource
import signal
import sys
import time
import zipfile
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from headscope.errors import HeadscopeError
from headscope.formats.base import open_checkpoint

SECONDS, BYTES = 5, 1 << 30  # for one file


def mutated(data: bytes, how: str, rng: random.Random) -> bytes:
    if how == "truncated":
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    if how == "flipped":
        changed[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "head":  # the pickle stands at the front
        changed[rng.randrange(min(len(data), 6000))] ^= 1 << rng.randrange(8)
    elif how == "tail":  # the zip's directory at the end
        changed[-rng.randrange(1, min(len(data), 6000))] ^= 1 << rng.randrange(8)
    else:
        start = rng.randrange(len(data))
        changed[start : start + 8] = rng.randbytes(8)
    return bytes(changed)


def repacked(data: bytes, rng: random.Random) -> bytes:
    """The pickle changed and the archive made anew, so that its checksums are right."""
    made = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as before, zipfile.ZipFile(made, "w") as after:
        for name in before.namelist():
            content = before.read(name)
            after.writestr(
                name, mutated(content, rng.choice(["flipped", "bytes"]), rng) if "data.pkl" in name else content
            )
    return made.getvalue()


def results(path: Path) -> Any:
    opened = open_checkpoint(str(path), device="cpu")
    return opened.model.config, opened.source, opened.target, opened.model.state_dict()  # type: ignore[attr-defined]


def equal(one: Any, other: Any) -> bool:
    same = list(one[3]) == list(other[3]) and all(torch.equal(one[3][key], other[3][key]) for key in one[3])
    return same and one[:3] == other[:3]


def ceiling() -> None:
    """At most BYTES more than now; an attempt to take more is a MemoryError."""
    lines = Path("/proc/self/status").read_text().splitlines()
    now = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmSize"))
    resource.setrlimit(resource.RLIMIT_AS, (now + BYTES, now + BYTES))


def main(path: Path, folder: Path, count: int) -> None:
    data, reference = path.read_bytes(), results(path)
    zipped = data.startswith(b"PK")
    seen: Counter[str] = Counter()
    odd: list[str] = []
    slowest = 0.0
    hows = ["flipped", "truncated", "head", "tail", "bytes"] + ["repacked"] * zipped
    for number in range(count):
        rng, how = random.Random(number), hows[number % len(hows)]
        place = folder / "c.pt"
        place.write_bytes(repacked(data, rng) if how == "repacked" else mutated(data, how, rng))
        begin = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            found = results(place)
            # without checksums a changed number is a number like any other
            fine = not zipped or how == "repacked" or equal(found, reference)
            seen["equal" if fine else "different"] += 1
        except HeadscopeError as error:
            seen["error"] += 1
            if "\n" in str(error) or not str(error).strip() or len(str(error)) > 600:
                odd.append(f"{number} {how}: {error!r}")
        except BaseException as error:
            odd.append(f"{number} {how}: {type(error).__name__}: {str(error)[:200]}")
        signal.setitimer(signal.ITIMER_PROF, 0)
        slowest = max(slowest, time.process_time() - begin)
    print(json.dumps({"seen": dict(seen), "odd": odd[:10], "slowest": slowest}))


def _too_slow(*_: object) -> None:
    raise TimeoutError


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, _too_slow)
    torch.set_num_threads(1)
    ceiling()
    while len(sys.argv) > 1:
        main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
        del sys.argv[1:4]
