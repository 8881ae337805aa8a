"""`headscope train`: options made from config classes, presets, files, resuming, and what is refused."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from headscope.training.variant import VARIANTS

Ran = tuple[int, str, str]
Command = Callable[..., Ran]


@pytest.fixture
def headscope(monkeypatch: pytest.MonkeyPatch, command: Command) -> Command:
    """Run a command in this process, in lines of 200 columns."""
    monkeypatch.setenv("COLUMNS", "200")
    return command


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """The options that name the texts."""
    folder, chance = tmp_path_factory.mktemp("text"), random.Random(0)
    words = ["".join(chance.choices("abdegiklmnorstu", k=chance.randint(2, 6))) for _ in range(30)]
    for part, count in (("", 60), ("valid-", 5)):
        lines = [chance.choices(words, k=chance.randint(2, 6)) for _ in range(count)]
        for side, step in (("source", 1), ("target", -1)):
            said = "".join(" ".join(word[::step] for word in line) + "\n" for line in lines)
            (folder / f"{part}{side}").write_text(said, encoding="utf-8")
    names = [f"{part}{side}" for part in ("", "valid-") for side in ("source", "target")]
    return [part for name in names for part in (f"--{name}", folder / name)]


SIZES = [
    *("--vocab-size", 60, "--d-model", 16, "--d-ffn", 16, "--encoder-layers", 1, "--decoder-layers", 1, "--heads", 2),
    *("--max-tokens", 150, "--bleu-every", 0),
]


def test_help_lists_the_variants_and_their_options(headscope: Command) -> None:
    status, shown, _ = headscope("train", "--help")
    assert status == 0 and all(name in shown for name in VARIANTS.names())
    status, shown, _ = headscope("train", "baseline", "--help-all")
    assert status == 0
    for option in ("--source", "--preset", "--label-smoothing", "--patience", "--average", "--resume", "--config"):
        assert option in shown
    assert "inverse-sqrt|cosine|constant" in shown


def test_a_run_its_result_as_json_and_going_on(headscope: Command, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    status, shown, err = headscope("train", "baseline", *data, *SIZES, "--updates", 3, "--out", out, "--json")
    assert status == 0 and err == ""
    found = json.loads(shown)["record"]
    assert found["update"] == 3 and found["reason"] == "updates" and found["folder"] == str(out)
    status, shown, _ = headscope("train", "baseline", "--out", out, "--resume", "--updates", 5)
    assert status == 0 and "5 updates" in shown and "Checkpoints: " in shown
    about = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert about["config"]["vocab_size"] == 60 and about["command"][-1] == "5"


def test_without_validation_text_it_says_that_best_is_last(
    headscope: Command, data: list[object], tmp_path: Path
) -> None:
    """Before the run, on stderr, and after it; with a file of weights that is the same."""
    out, says = tmp_path / "run", "without validation text the checkpoint best is last; give --valid-source and"
    status, shown, err = headscope("train", "baseline", *data[:4], *SIZES, "--updates", 2, "--out", out)
    assert status == 0 and says in shown
    assert err.startswith(f"note: {says}") and err.count("\n") == 1
    best, last = ((out / name / "model.safetensors").read_bytes() for name in ("best", "last"))
    assert best == last


def test_the_command_line_wins_over_the_file_over_the_preset(
    headscope: Command, data: list[object], tmp_path: Path
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('preset = "tiny"\nlr = 0.004\nbetas = [0.8, 0.9]\nupdates = 1\n', encoding="utf-8")
    out = tmp_path / "run"
    status, _, err = headscope("train", "baseline", "--config", config, *data, *SIZES, "--dropout", 0.25, "--out", out)
    assert status == 0, err
    found = json.loads((out / "run.json").read_text(encoding="utf-8"))["config"]
    assert (found["dropout"], found["lr"], found["warmup"], found["betas"]) == (0.25, 0.004, 2000, [0.8, 0.9])
    assert found["d_model"] == 16 and found["average"] == 10 and found["updates"] == 1


def test_what_the_user_can_fix_ends_with_one_line_and_status_2(
    headscope: Command, data: list[object], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    short = tmp_path / "short"
    short.write_text("a b\n", encoding="utf-8")
    strange = tmp_path / "strange.toml"
    strange.write_text("learning-rate = 1\n", encoding="utf-8")
    for arguments, message in (
        (["train", "basline", *data], "unknown variant 'basline'; did you mean 'baseline'?"),
        (["train", "baseline"], "no text: give --source FILE"),
        (["train", "baseline", *data, "--target", short], "different numbers of lines"),
        (["train", "baseline", *data, "--d-model", 10, "--heads", 4], "--d-model 10 is not divisible by --heads 4"),
        (["train", "baseline", *data, "--vocab-size", 5000], "--vocab-size 5000 is more than the training text"),
        (["train", "baseline", *data, "--preset", "huge"], "--preset 'huge' is not known; available: tiny, small"),
        (["train", "baseline", *data, "--betas", "0.9;0.98"], "--betas is '0.9;0.98'; its entry 1 must be a number"),
        (["train", "baseline", *data, "--norm", "middle"], "--norm is 'middle'; it must be 'pre' or 'post'"),
        (["train", "baseline", *data, "--config", strange], "unknown option 'learning-rate'; there are"),
        (["train", "baseline", *data, "--init", tmp_path / "none"], "there is no file or directory"),
        (["train", "baseline", *data, "--precision", "fp16", "--device", "cpu"], "--precision fp16 needs a GPU"),
    ):
        status, shown, err = headscope(*arguments, "--out", out)
        assert (status, shown) == (2, ""), arguments
        assert re.fullmatch(r"error: [^\n]+\n", err) and message in err, err


def test_a_loss_that_is_no_number_ends_with_status_2(headscope: Command, data: list[object], tmp_path: Path) -> None:
    arguments = ["--lr", "1e30", "--warmup", 0, "--updates", 50, "--out", tmp_path / "run"]
    status, _, err = headscope("train", "baseline", *data, *SIZES, *arguments)
    assert status == 2 and re.search(r"is (nan|inf|-inf) in update \d+ \(epoch 1, batch \d+, training lines", err)


def test_another_variant_is_not_resumed(headscope: Command, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "run.json").write_text('{"variant": "swap", "config": {"out": ""}, "options": {}}', encoding="utf-8")
    status, _, err = headscope("train", "baseline", *data, "--out", out, "--resume")
    assert status == 2 and "is of variant 'swap', not 'baseline'" in err


def test_variants_together_in_any_order(headscope: Command, data: list[object], tmp_path: Path) -> None:
    out, swaps = tmp_path / "run", tmp_path / "swaps.toml"
    swaps.write_text('[[swap]]\nepoch = 2\nfirst = "encoder-self.0.0"\nsecond = "encoder-self.0.1"\n', encoding="utf-8")
    both = ["--swap-schedule", swaps, "--gamma", 0.1, "--start-after", 0.2]
    status, shown, err = headscope("train", "swap+mixing", *data, *SIZES, *both, "--max-epochs", 2, "--out", out)
    assert (status, err) == (0, "") and "Checkpoints: " in shown
    about = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert about["variant"] == "mixing+swap" and about["options"]["gamma"] == 0.1
    assert "m:train.mixing+swap|" in about["signature"]
    assert about["options"]["swap_schedule"] == str(swaps)
    columns = (out / "metrics.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert {"window", "nuclear_norm.encoder-self", "swaps.schedule"} <= set(columns)
    status, _, err = headscope("train", "mixing+swap", "--out", out, "--resume")
    assert (status, err.count("\n")) == (0, 1) and "was complete" in err
    status, _, err = headscope("train", "swap", "--out", out, "--resume")
    assert status == 2 and "is of variant 'mixing+swap', not 'swap'" in err


def test_help_of_variants_together(headscope: Command) -> None:
    status, shown, _ = headscope("train", "mixing+swap+disagreement", "--help-all")
    assert status == 0
    for option in ("--gamma", "--start-after", "--swap-schedule", "--dynamic-rest", "--weight", "--compat"):
        assert option in shown
    status, shown, _ = headscope("train", "--help")
    assert status == 0 and "headscope train mixing+swap" in shown


def test_variants_that_cannot_be_combined(headscope: Command, data: list[object], tmp_path: Path) -> None:
    for name, message in (
        ("mae+mixing", "variant 'mae+mixing': mae and mixing both decide how heads are mixed; take one of them"),
        ("baseline+swap", "baseline cannot be combined, because it is training without any variant; take swap"),
        ("mixing+swop", "unknown variant 'swop'; did you mean 'swap'?"),
    ):
        status, shown, err = headscope("train", name, *data, "--out", tmp_path / "run")
        assert (status, shown) == (2, "") and re.fullmatch(r"error: [^\n]+\n", err) and message in err
