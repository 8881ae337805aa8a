"""Several processes under one torchrun."""

import json
import random
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from headscope.formats.native import NATIVE
from tests.makers.ranks import ranks
from tests.makers.shared import Command, write_lines
from tests.oracles import checkpoints, classifiers

pytestmark = pytest.mark.slow
OBS = "--keep 2 --by obs-task --compensate least-squares --out"
STEPS = "--keep 2 --by confidence --steps 2 --out"
TABLES = {"obs/ranking.csv": 1e-4, "steps/ranking.csv": 1e-4, "evaluate": 1e-6, "each": 1e-6} | {
    f"{run}/{file}.csv": 1e-6 for run in ("l0", "subset") for file in ("ranking", "gates")
}
"""Tables that are compared, and how far they may be apart."""


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


def test_two_processes_write_what_one_process_writes(tmp_path: Path, command: Command) -> None:
    model = classifiers.folder(tmp_path / "model", "bert-encoder")
    text = write_lines(tmp_path / "text.en", classifiers.texts(23))
    options = ["analyze", model, "--source", text, "--batch-tokens", 20, "--bootstrap", 20, "--no-figures", "--json"]
    _, alone, _ = command(*options, "--out", tmp_path / "one")
    first, second = ranks(tmp_path / "said", ["-m", "headscope", *options, "--out", tmp_path / "two"], world=2)
    assert (first[0], second[:2]) == (0, (0, "")), (first, second)  # the first process alone speaks
    assert json.loads(alone)["answers"] == json.loads(first[1])["answers"]
    single, double = (pd.read_csv(tmp_path / name / "heads.csv") for name in ("one", "two"))
    pd.testing.assert_frame_equal(single, double, rtol=1e-6, atol=1e-7)
    files = [sorted(path.name for path in (tmp_path / name).rglob("*")) for name in ("one", "two")]
    assert files[0] == files[1]


def prepare_translation(folder: Path) -> tuple[Path, list[object]]:
    """A small translation model without dropout, and texts whose batches do not divide by two, as options."""
    NATIVE.save(checkpoints.small(), folder / "translates")
    chance = random.Random(5)
    lines = ["", *(" ".join(chance.choices("abcdefghijk", k=chance.randint(1, 6))) for _ in range(22))]
    write_lines(folder / "text", lines)
    for side, length in (("source", 6), ("target", 3)):
        write_lines(folder / side, [" ".join(line.split()[:length]) for line in lines if line])
    texts = ["--source", folder / "source", "--target", folder / "target", "--batch-tokens", 37]
    return folder / "translates", texts


def test_two_processes_rank_learn_score_and_translate_what_one_does(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates are learnt from the same batches, dealt out sentence by sentence; tables are equal, and there is one."""
    model, texts = prepare_translation(tmp_path)
    encoder = classifiers.folder(tmp_path / "encodes", "bert-encoder")
    word_options = ["--source", write_lines(tmp_path / "words", classifiers.texts(23)), "--batch-tokens", 40, "--json"]
    learning = [*texts, *shlex.split("--dtype float64 --updates 5 --lr 0.01 --tune-updates 2 --json --out")]
    lines: dict[str, list[object]] = {
        "obs": ["prune", "rank", encoder, *word_options, *shlex.split(OBS)],
        "steps": ["prune", "rank", encoder, *word_options, *shlex.split(STEPS)],
        "l0": ["prune", "l0", model, "--lambda", 0.1, *learning],
        "subset": ["prune", "subset", model, "--keep", 5, *learning],
        "evaluate": ["evaluate", model, *texts, "--json", "--per-sentence"],
        "each": ["evaluate", model, *texts, "--json", "--each-head", "--metrics", "perplexity,bleu", "--out"],
        "translate": ["translate", model, "--batch-tokens", 11, "--window", 9, "--scores"],
    }
    alone, shared = {}, {}
    for name, line in lines.items():
        single, pair = ([*line, tmp_path / f"{key}-{name}"] if name != "translate" else line for key in ("one", "two"))
        shared[name] = [str(word) for word in pair]
        with (tmp_path / "text").open() as text:
            monkeypatch.setattr(sys, "stdin", text)
            status, alone[name], err = command(*single)
        assert status == 0, err
    (tmp_path / "commands.json").write_text(json.dumps(shared), encoding="utf-8")
    (tmp_path / "commands.py").write_text(COMMANDS, encoding="utf-8")
    for status, out, err in ranks(tmp_path / "said", [tmp_path / "commands.py", tmp_path], world=2):
        assert (status, out) == (0, ""), err
    together = {name: (tmp_path / f"{name}.0").read_text(encoding="utf-8") for name in lines}
    assert together["translate"] == alone["translate"]
    assert all((tmp_path / f"{name}.1").read_bytes() == b"" for name in lines)
    for table, within in TABLES.items():
        expected, actual = (pd.read_csv(tmp_path / f"{key}-{table}") for key in ("one", "two"))
        pd.testing.assert_frame_equal(actual, expected, rtol=within, atol=1e-9, obj=table)
    records = {
        name: [json.loads(outs[name])["record"] for outs in (together, alone)] for name in ("obs", "steps", "evaluate")
    }
    for name in ("obs", "steps"):
        assert records[name][0]["removed"] == records[name][1]["removed"]
    for score, other in zip(*(record["scores"] for record in records["evaluate"]), strict=True):
        assert score["metric"] == other["metric"] and score["value"] == pytest.approx(other["value"], rel=1e-6)
    for run in ("l0", "subset"):
        weights = [load_file(tmp_path / f"{key}-{run}" / "model" / "model.safetensors") for key in ("one", "two")]
        torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-9)
    for run in ("obs", "steps", "l0"):
        files = [sorted(path.name for path in (tmp_path / f"{key}-{run}").rglob("*")) for key in ("one", "two")]
        assert files[0] == files[1]


def test_a_process_that_is_killed_ends_the_run(tmp_path: Path) -> None:
    (model, texts), script = prepare_translation(tmp_path), tmp_path / "dies.py"
    script.write_text(DIES, encoding="utf-8")
    arguments = [script, "prune", "l0", model, "--lambda", 0.1, *texts, "--updates", 5, "--out", tmp_path / "out"]
    (status, out, err), (killed_status, *_) = ranks(tmp_path / "said", arguments, world=2)
    assert (status, out, killed_status) == (2, "", -9)
    assert err.endswith("error: another process of this torchrun has ended before its work was done\n")
    assert not list(tmp_path.glob("out*"))
