"""Outputs of a fixed set of commands, recorded before a change of structure and compared after it.

    python benchmarks/recorded.py record FOLDER [--only NAME,NAME]
    python benchmarks/recorded.py compare BEFORE AFTER

`record` runs every command of `COMMANDS` in a folder of its own, one thread each, and keeps what it wrote and printed.
`compare` names every file that differs: bytes for most of them; JSON without times, paths, versions and the command;
text without times and paths. Exit status 1 where anything differs. It needs no other data than those that ship.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "headscope" / "assets"
BERT = "import sys; from headscope.assets import demo_checkpoint; sys.stdout.write(str(demo_checkpoint()))"

PAIRS = f"--source {ASSETS}/captions.en --target {ASSETS}/captions.de --max-sentences 24"
TRAIN = (
    f"--source {ASSETS}/captions.en --target {ASSETS}/captions.de --valid-source {ASSETS}/sample.en "
    f"--valid-target {ASSETS}/sample.de --max-sentences 100 --vocab-size 200 --d-model 32 --d-ffn 32 --heads 4 "
    "--encoder-layers 2 --decoder-layers 2 --max-tokens 400 --max-epochs 2 --set threads=1 --device cpu"
)
EVERY = "confidence.base,confidence.advanced,similarity.js"
LEARN = f"{PAIRS} --updates 4 --tune-updates 2 --batch-tokens 400"
COMMANDS = {
    "show": "show {bert} --json",
    "bert": f"analyze {{bert}} --source {ASSETS}/sample.en --parse {ASSETS}/sample.conllu --max-sentences 24 "
    f"--also {EVERY} --set syntactic.relations=all --set syntactic.min-instances=3 --set detail=true --out out",
    "pair": f"analyze {{pair}} {PAIRS} --also {EVERY} --mhr-pickles --out out",
    "importance": f"analyze {{pair}} {PAIRS} --max-sentences 6 --importance --also shapley "
    "--set shapley.shapley-samples=2 --set lrp.rules=voita,attnlrp,cp --out out",
    "faithfulness": f"analyze {{bert}} --source {ASSETS}/sample.en --max-sentences 8 "
    "--only confidence,taylor,magnitude --faithfulness --set faithfulness-steps=3 --set faithfulness-seeds=2 --out out",
    "rank": f"prune rank {{pair}} {PAIRS} --by gradient --keep 48 --out out",
    "rank-lrp": f"prune rank {{pair}} {PAIRS} --max-sentences 4 --by lrp --keep 60 --steps 2 --tune-updates 1 "
    "--out out",
    "remove": "prune remove {bert} --heads encoder-self.0.2,encoder-self.2.*,encoder-self.5.1 --rounds 1 --out out",
    "l0": f"prune l0 {{pair}} {LEARN} --keep 60 --out out",
    "subset": f"prune subset {{pair}} {LEARN} --keep 60 --out out --remove",
    "sweep": f"prune sweep {{pair}} {PAIRS} --valid-source {ASSETS}/captions.en --valid-target {ASSETS}/captions.de "
    "--valid-sentences 8 --methods random,magnitude --keep 60 --seeds 1 --bootstrap 20 --tune-updates 2 "
    "--batch-tokens 400 --out out",
    "baseline": f"train baseline {TRAIN} --out out",
    "wide": f"train wide {TRAIN} --d-head 16 --out out",
    "narrow": f"train narrow {TRAIN} --out out",
    "mixing": f"train mixing {TRAIN} --start-after 0.2 --gamma 0.1 --out out",
    "swap": f"train swap {TRAIN} --dynamic hard --out out",
    "mae": f"train mae {TRAIN} --gate-every 1 --out out",
    "disagreement": f"train disagreement {TRAIN} --out out",
    "evaluate": f"evaluate {{pair}} {PAIRS} --per-sentence out.csv --json",
    "each-head": f"evaluate {{pair}} {PAIRS} --each-head --heads encoder-self.0.*,cross.2.* --out out.csv",
    "translate": f"translate {{pair}} --beam 3 --scores < {ASSETS}/sample.en",
    "convert": "convert {before}/baseline/out/best out --to native",
    "mixed": f"analyze {{before}}/mixing/out/best {PAIRS} --also {EVERY} --mhr-pickles --out out",
    "experts": f"analyze {{before}}/mae/out/best {PAIRS} --out out",
    **{
        f"plot-{name}": f"plot {name} {{before}}/{run}/out --out out.png"
        for name, run in {
            "heads": "bert",
            "functions": "bert",
            "positional": "bert",
            "syntactic": "bert",
            "similarity": "pair",
            "faithfulness": "faithfulness",
            "alphas": "mixed",
            "training": "mixing",
            "pruning": "sweep",
        }.items()
    },
}
UNCERTAIN = {
    *("seconds", "command", "python", "libraries", "path", "versions", "headscope", "created", "started", "ended"),
    *("times", "timing", "milliseconds", "speed", "cpu_seconds", "date", "threads", "platform", "machine", "digest"),
    *("tokens_per_second", "minutes"),
}
"""Keys of JSON files, and columns, whose values differ from run to run or from folder to folder."""


def record(folder: Path, only: set[str]) -> int:
    """Run the commands; returns the number of failures."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "HF_HUB_OFFLINE": "1"}
    bert = subprocess.run([sys.executable, "-c", BERT], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    failures = 0
    for name, command in COMMANDS.items():
        if only and name not in only:
            continue
        out = folder / name
        out.mkdir(parents=True)
        # the runs that figures are drawn from are those of the same recording
        line = command.format(bert=bert, pair=ASSETS / "en-de", before=folder.resolve())
        process = subprocess.run(
            f"{sys.executable} -m headscope {line}",
            shell=True,
            cwd=out,
            env=environment,
            capture_output=True,
            text=True,
        )
        (out / "stdout.txt").write_text(process.stdout, encoding="utf-8")
        (out / "stderr.txt").write_text(process.stderr, encoding="utf-8")
        (out / "status.txt").write_text(f"{process.returncode}\n", encoding="utf-8")
        failures += process.returncode != 0
        print(f"{name}: {process.returncode}", flush=True)
    return failures


def certain(value: object) -> object:
    """A JSON value without what differs from run to run."""
    if isinstance(value, dict):
        return {key: certain(entry) for key, entry in value.items() if key not in UNCERTAIN}
    if isinstance(value, list):
        return [certain(entry) for entry in value]
    if isinstance(value, tuple):
        return tuple(certain(entry) for entry in value)
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return re.sub(r"/\S+/", "", value) if isinstance(value, str) else value


def content(path: Path) -> object:
    """The part of a file that is compared."""
    if path.suffix == ".json":
        return certain(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".txt":
        text = re.sub(r"/\S+/", "", path.read_text(encoding="utf-8"))
        text = re.sub(r"^.*, ms .*$", "", text, flags=re.M)
        return re.sub(r"\d+(\.\d+)? ?(ms|s|seconds|sentences/s|tokens/s)\b", "", text)
    if path.suffix == ".csv":
        return pd.read_csv(path, dtype=str).drop(columns=list(UNCERTAIN), errors="ignore").to_csv()
    if path.suffix == ".pt":  # written by a command of this recording
        return certain(torch.load(path, map_location="cpu", weights_only=False))
    return path.read_bytes()


def differing(before: Path, after: Path) -> list[str]:
    """Names of files that differ, or that one recording lacks."""
    names = {
        str(path.relative_to(folder)) for folder in (before, after) for path in folder.rglob("*") if path.is_file()
    }
    rows = []
    for name in sorted(names):
        if not (before / name).is_file() or not (after / name).is_file():
            rows.append(f"only in one: {name}")
        elif content(before / name) != content(after / name):
            rows.append(f"differs: {name}")
    return rows


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.what == "record":
        sys.exit(record(args.folders[0], set(filter(None, args.only.split(",")))) > 0)
    rows = differing(*args.folders)
    print("\n".join(rows) or "equal")
    sys.exit(bool(rows))


if __name__ == "__main__":
    main()
