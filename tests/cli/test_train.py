"""`headscope train`: options made from config classes, presets, files, resuming, and what is refused."""

import json
from pathlib import Path

import pytest

from tests.makers.shared import Command, succeed
from tests.oracles import lessons
from tests.oracles.swaps import schedule


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The options that name the texts."""
    texts = lessons.texts(tmp_path_factory.mktemp("text"), lines=60)
    return [part for name, path in texts.items() for part in (f"--{name.replace('_', '-')}", path)]


SIZES = [
    *("--vocab-size", 60, "--d-model", 16, "--d-ffn", 16, "--encoder-layers", 1, "--decoder-layers", 1, "--heads", 2),
    *("--max-tokens", 150, "--bleu-every", 0),
]


def test_a_run_its_result_as_json_and_going_on(command: Command, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, output, err = command("train", "baseline", *data, *SIZES, "--updates", 3, "--out", out, "--json")
    assert status == 0 and err == ""
    result = json.loads(output)["record"]["result"]
    assert result["update"] == 3 and result["reason"] == "updates" and result["folder"] == str(out)
    output = succeed(command, "train", "baseline", "--out", out, "--resume", "--updates", 5)
    assert "5 updates" in output and "Checkpoints: " in output
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["config"]["vocab_size"] == 60 and record["command"][-1] == "5"


def test_without_validation_text_it_says_that_best_is_last(
    command: Command, data: list[object], tmp_path: Path
) -> None:
    """It says so once, before the run, on stderr; both files of weights are equal."""
    out, note = tmp_path / "run", "without validation text the checkpoint best is the last one; give --valid-source and"
    status, output, err = command("train", "baseline", *data[:4], *SIZES, "--updates", 2, "--out", out)
    assert status == 0 and note not in output
    assert err.startswith(f"note: {note}") and err.count("\n") == 1
    best, last = ((out / name / "model.safetensors").read_bytes() for name in ("best", "last"))
    assert best == last


def test_the_command_line_wins_over_the_file_over_the_preset(
    command: Command, data: list[object], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('preset = "tiny"\nlr = 0.004\nbetas = [0.8, 0.9]\nupdates = 1\ndropout = 0.5\n', encoding="utf-8")
    out = tmp_path / "run"
    succeed(command, "train", "baseline", "--config", config, *data, *SIZES, "--dropout", 0.25, "--out", out)
    options = json.loads((out / "run.json").read_text(encoding="utf-8"))["config"]
    assert (options["dropout"], options["lr"], options["warmup"], options["betas"]) == (0.25, 0.004, 2000, [0.8, 0.9])
    assert options["d_model"] == 16 and options["average"] == 10 and options["updates"] == 1


@pytest.mark.slow
def test_variants_together_in_any_order(command: Command, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    swaps = schedule(tmp_path / "swaps.json", {2: ["encoder-self.0.0 encoder-self.0.1"]})
    options = ["--swap-schedule", swaps, "--gamma", 0.1, "--start-after", 0.2]
    status, output, err = command("train", "swap+mixing", *data, *SIZES, *options, "--max-epochs", 2, "--out", out)
    assert (status, err) == (0, "") and "Checkpoints: " in output
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["variant"] == "mixing+swap" and record["options"]["gamma"] == 0.1
    assert "m:train.mixing+swap|" in record["signature"]
    assert record["options"]["swap_schedule"] == str(swaps)
    columns = (out / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {"window", "nuclear_norm.encoder-self", "swaps.schedule"} <= set(columns)
    status, _, err = command("train", "mixing+swap", "--out", out, "--resume")
    assert (status, err.count("\n")) == (0, 1) and "was complete" in err
    status, _, err = command("train", "swap", "--out", out, "--resume")
    assert status == 2 and "is of variant 'mixing+swap', not 'swap'" in err
