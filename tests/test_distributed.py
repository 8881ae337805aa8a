"""Several processes under one torchrun."""

from __future__ import annotations

import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

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


def test_trainings_one_after_the_other_under_one_torchrun(tmp_path: Path, python: Callable[..., str]) -> None:
    """They meet once, and two processes give what one gives with batches of both, and keep rows of all batches."""
    chance, script = random.Random(3), tmp_path / "trainings.py"
    words = ["ab", "bba", "cd", "dcc", "e", "fee"]
    lines = [" ".join(chance.choices(words, k=chance.randint(2, 7))) for _ in range(60)]
    for side, text in (("source", lines), ("target", [line[::-1] for line in lines])):
        (tmp_path / side).write_text("".join(f"{line}\n" for line in text), encoding="utf-8")
    script.write_text(TRAININGS, encoding="utf-8")
    for number, name in enumerate(("one", "two"), start=1):
        python(script, tmp_path, tmp_path / name, processes=number)
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
    """Both processes find the mistake; torchrun's own report comes beside their one line."""
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "-m", "headscope"]
    arguments = ["analyze", "nothing", "--source", str(tmp_path / "nothing"), "--out", str(tmp_path / "out")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *torchrun, *arguments], capture_output=True, text=True, env=environment, timeout=900
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode != 0 and said == [f"error: there is no file {tmp_path / 'nothing'}"]
    assert "exitcode: 2" in done.stderr.replace("exitcode  : 2", "exitcode: 2") and done.stdout == ""
