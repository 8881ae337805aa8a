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
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(prefix="headscope-resume-"))
    try:
        text(folder, random.Random(0), args.sentences)
        result = study(args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(result))
    sys.exit(0 if not result["different"] and result["processes"] < 1e-5 else 1)


def study(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both experiments: counts of moments, kills and renames, and the files that differ."""
    chance = random.Random(args.seed)
    start = time.monotonic()
    renames = folder / "renames"
    assert exits_well(fork(lambda: count_renames(renames, lambda: work(args, folder / "whole"))))
    duration, count = time.monotonic() - start, int(renames.read_text())
    different, kills = [], 0
    for number in range(args.moments):
        out = folder / f"killed{number}"
        by_time = number % 2 == 0
        moment = chance.uniform(0, duration) if by_time else float(chance.randrange(count))
        if by_time:
            child = fork(lambda out=out: work(args, out))  # type: ignore[misc]
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        else:
            child = fork(lambda out=out, n=int(moment): dying(n, lambda: work(args, out)))  # type: ignore[misc]
        kills += not exits_well(child)
        assert exits_well(fork(lambda out=out: work(args, out)))  # type: ignore[misc]
        if names := differences(folder / "whole", out):
            different.append({"moment": moment, "by": "time" if by_time else "rename", "files": names})
        shutil.rmtree(out)
    gap = two_processes(args, folder) if args.variant == "baseline" else 0.0
    return {"moments": args.moments, "killed": kills, "renames": count, "different": different, "processes": gap}


def two_processes(args: argparse.Namespace, folder: Path) -> float:
    """Largest difference of a weight, relative to the largest weight, between one process and two."""
    deterministic = {"dropout": 0.0, "attention_dropout": 0.0}
    assert exits_well(fork(lambda: work(args, folder / "one", accumulate=2, **deterministic)))
    port = str(20000 + os.getpid() % 20000)
    children = [
        fork(lambda rank=rank: as_rank(rank, port, lambda: work(args, folder / "two", **deterministic)))  # type: ignore[misc]
        for rank in range(2)
    ]
    assert all([exits_well(child) for child in children])
    single, double = (torch.load(folder / name / STATE, weights_only=True)["model"] for name in ("one", "two"))
    return max(float((single[key] - double[key]).abs().max() / single[key].abs().max().clamp_min(1)) for key in single)


def work(args: argparse.Namespace, out: Path, **more: Any) -> None:
    """Train, or resume."""
    kind = VARIANTS.get(args.variant)
    options = set_values(args.option, list(declared_options(kind.Options)), {})
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
            content = "".join(" ".join(word[::step] for word in line) + "\n" for line in lines)
            (folder / f"{part}{side}").write_text(content, encoding="utf-8")


def differences(reference: Path, other: Path) -> list[str]:
    """Files that differ."""
    names = [f"{name}/model.safetensors" for name in ("last", "best", "averaged")]
    different = [name for name in names if (reference / name).read_bytes() != (other / name).read_bytes()]
    different += ["metrics.csv"] if rows(reference / "metrics.csv") != rows(other / "metrics.csv") else []
    return different + sorted(files(reference) ^ files(other))


def rows(path: Path) -> list[dict[str, str]]:
    """The rows of a table without columns of time."""
    with path.open(encoding="utf-8") as file:
        return [{name: cell for name, cell in row.items() if name not in TIMES} for row in csv.DictReader(file)]


def files(folder: Path) -> set[str]:
    """Paths in a run's directory."""
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


# Processes. They are forked from this one, which has torch in memory already and has not computed anything with it.


def fork(action: Callable[[], None]) -> int:
    """Fork a child that runs `action` and exits; its id."""
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


def exits_well(child: int) -> bool:
    """Wait for a child; whether its status is 0."""
    return os.waitpid(child, 0)[1] == 0


def count_renames(path: Path, action: Callable[[], None]) -> None:
    """Run `action`, and write the number of its renames."""
    count = [0]
    _hook_renames(lambda: count.__setitem__(0, count[0] + 1))
    action()
    path.write_text(str(count[0]))


def dying(number: int, action: Callable[[], None]) -> None:
    """Run `action`, and die before rename `number`."""
    left = [number]

    def hook() -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1

    _hook_renames(hook)
    action()


def _hook_renames(hook: Callable[[], None]) -> None:
    for name in ("replace", "rename"):
        real = getattr(os, name)

        def rename(*args: Any, real: Callable[..., None] = real, **kwargs: Any) -> None:
            hook()
            real(*args, **kwargs)

        setattr(os, name, rename)


def as_rank(rank: int, port: str, action: Callable[[], None]) -> None:
    """Run `action` as one of two processes."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    action()


if __name__ == "__main__":
    main()
