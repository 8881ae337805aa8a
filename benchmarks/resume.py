"""Is a run that was killed and resumed bit for bit the run that was not? And do two processes give one's result?

    python benchmarks/resume.py [--moments 20] [--variant baseline] [--option name=value …]

A small model learns an invented language. One process trains without a stop. Then, for every moment, a process is
killed by SIGKILL, by turns at a random time and before a random one of its renames (every file is written
under a temporary name and renamed), and another one resumes; weights of all checkpoints and the lines of metrics.csv
must be equal. Last, for the baseline, two processes (gloo) train at the same global batch, without dropout: largest
difference. (Variants may draw random numbers per sentence, so theirs differ as dropout does.)
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headscope.cli.options import set_values
from headscope.config.option import declared_options, make_config
from headscope.training.checkpoints import FILE as STATE
from headscope.training.config import TrainConfig
from headscope.training.trainer import train
from headscope.training.variant import VARIANTS

TIMES = ("seconds", "tokens_per_second")


def main() -> None:
    """Run the study; exit status 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=20)
    parser.add_argument("--variant", default="baseline")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sentences", type=int, default=150)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="headscope-resume-"))
    try:
        text(folder, random.Random(0), asked.sentences)
        result = study(asked, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    sys.exit(0 if not result["different"] and result["processes"] < 1e-5 else 1)


def study(asked: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both questions; how often a moment hit what, and what differed."""
    chance = random.Random(asked.seed)
    begun = time.monotonic()
    renames = folder / "renames"
    assert ended(forked(lambda: counted(renames, lambda: work(asked, folder / "whole"))))
    took, count = time.monotonic() - begun, int(renames.read_text())
    different, killed = [], 0
    for number in range(asked.moments):
        out = folder / f"killed{number}"
        by_time = number % 2 == 0
        moment = chance.uniform(0, took) if by_time else float(chance.randrange(count))
        if by_time:
            child = forked(lambda out=out: work(asked, out))  # type: ignore[misc]
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        else:
            child = forked(lambda out=out, n=int(moment): dying(n, lambda: work(asked, out)))  # type: ignore[misc]
        killed += not ended(child)
        assert ended(forked(lambda out=out: work(asked, out)))  # type: ignore[misc]
        if found := differences(folder / "whole", out):
            different.append({"moment": moment, "by": "time" if by_time else "rename", "files": found})
        shutil.rmtree(out)
    gap = two_processes(asked, folder) if asked.variant == "baseline" else 0.0
    return {"moments": asked.moments, "killed": killed, "renames": count, "different": different, "processes": gap}


def two_processes(asked: argparse.Namespace, folder: Path) -> float:
    """Largest difference of a weight, relative to the largest weight, between one process and two."""
    still = {"dropout": 0.0, "attention_dropout": 0.0}
    assert ended(forked(lambda: work(asked, folder / "one", accumulate=2, **still)))
    port = str(20000 + os.getpid() % 20000)
    children = [
        forked(lambda rank=rank: ranked(rank, port, lambda: work(asked, folder / "two", **still)))  # type: ignore[misc]
        for rank in range(2)
    ]
    assert all([ended(child) for child in children])
    one, two = (torch.load(folder / name / STATE, weights_only=True)["model"] for name in ("one", "two"))
    return max(float((one[key] - two[key]).abs().max() / one[key].abs().max().clamp_min(1)) for key in one)


def work(asked: argparse.Namespace, out: Path, **more: Any) -> None:
    """Train, or go on."""
    kind = VARIANTS.get(asked.variant)
    options = set_values(asked.option, list(declared_options(kind.Options)), {})
    train(settings(out, **more), kind(make_config(kind.Options, options)), resume=True)


def settings(out: Path, **more: Any) -> TrainConfig:
    """A run of three epochs with every kind of file."""
    values: dict[str, Any] = {
        "vocab_size": 60,
        "d_model": 16,
        "d_ffn": 24,
        "heads": 4,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "dropout": 0.2,
        "attention_dropout": 0.1,
        "max_tokens": 150,
        "lr": 0.01,
        "warmup": 10,
        "max_epochs": 3,
        "average": 2,
        "save_every": 3,
        "log_every": 2,
        "bleu_sentences": 3,
        "beam": 2,
    }
    names = [f"{part}{side}" for part in ("", "valid_") for side in ("source", "target")]
    values |= {name: out.parent / name for name in names}
    return TrainConfig(out=out, **values | more)


def text(folder: Path, chance: random.Random, sentences: int) -> None:
    """Sentences of invented words, and their translations: each word spelled backwards."""
    words = ["".join(chance.choices("abdegiklmnorstu", k=chance.randint(2, 6))) for _ in range(40)]
    for part, count in (("", sentences), ("valid_", 20)):
        lines = [chance.choices(words, k=chance.randint(2, 9)) for _ in range(count)]
        for side, step in (("source", 1), ("target", -1)):
            said = "".join(" ".join(word[::step] for word in line) + "\n" for line in lines)
            (folder / f"{part}{side}").write_text(said, encoding="utf-8")


def differences(whole: Path, other: Path) -> list[str]:
    """Files that should be equal and are not."""
    names = [f"{name}/model.safetensors" for name in ("last", "best", "averaged")]
    found = [name for name in names if (whole / name).read_bytes() != (other / name).read_bytes()]
    found += ["metrics.csv"] if rows(whole / "metrics.csv") != rows(other / "metrics.csv") else []
    return found + sorted(files(whole) ^ files(other))


def rows(path: Path) -> list[dict[str, str]]:
    """A table without the columns that are about time."""
    with path.open(encoding="utf-8") as file:
        return [{name: cell for name, cell in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def files(folder: Path) -> set[str]:
    """What lies in a run's directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Processes. They are forked from this one, which has torch in memory already and has not computed anything with it.


def forked(action: Callable[[], None]) -> int:
    """The id of a child process that does something and ends."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        return child
    code = 1
    try:
        action()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ended(child: int) -> bool:
    """Wait; whether it ended well."""
    return os.waitpid(child, 0)[1] == 0


def counted(path: Path, action: Callable[[], None]) -> None:
    """Do something, and write how many renames it took."""
    count = [0]
    _before_rename(lambda: count.__setitem__(0, count[0] + 1))
    action()
    path.write_text(str(count[0]))


def dying(number: int, action: Callable[[], None]) -> None:
    """Do something, and die before rename `number`."""
    left = [number]

    def ask() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    _before_rename(ask)
    action()


def _before_rename(ask: Callable[[], None]) -> None:
    for name in ("replace", "rename"):
        real = getattr(os, name)

        def asking(*given: Any, real: Callable[..., None] = real, **named: Any) -> None:
            ask()
            real(*given, **named)

        setattr(os, name, asking)


def ranked(rank: int, port: str, action: Callable[[], None]) -> None:
    """Do something as one of two processes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    action()


if __name__ == "__main__":
    main()
