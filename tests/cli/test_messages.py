"""What commands say of files that are not there, before anything heavy is imported, and of what they left out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope.cli.failures import user_message
from headscope.errors import CheckpointError, ConfigError
from headscope.heads import Site, select_heads
from headscope.pruning.removal.verify import require

Command = Callable[..., tuple[int, str, str]]
MODEL = str(hs.assets.trained())
COMMANDS = {
    "evaluate": ["evaluate", MODEL],
    "analyze": ["analyze", MODEL, "--out", "o"],
    "rank": ["prune", "rank", MODEL, "--by", "magnitude", "--keep", "3", "--out", "o"],
    "remove": ["prune", "remove", MODEL, "--heads", "cross.0.0", "--out", "o"],
    "sweep": ["prune", "sweep", MODEL, "--out", "o"],
    "l0": ["prune", "l0", MODEL, "--out", "o"],
    "train": ["train", "baseline", "--out", "o"],
}
IN_A_PROCESS = """
import sys
for words in {commands!r}:
    sys.argv = ["headscope", *words, "--source", "missing.txt"]
    from headscope.cli import main
    try:
        main.run()
    except SystemExit as ended:
        print(words[1], ended.code, "torch" in sys.modules)
"""


def test_a_missing_text_is_said_before_torch_is_imported(python: Callable[..., str], tmp_path: Path) -> None:
    said = python("-c", IN_A_PROCESS.format(commands=list(COMMANDS.values()))).splitlines()
    assert [line.split()[1:] for line in said] == [["2", "False"]] * len(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_text_is_named(name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, _, error = command(*COMMANDS[name], "--source", "missing.txt")
    assert (status, error) == (2, "error: there is no file missing.txt\n") and not (tmp_path / "o").exists()


def test_a_missing_list_of_heads_is_a_missing_file() -> None:
    layout = {(Site.CROSS, 0): 2}
    for name in ("removed.txt", "runs/ranked/removed.txt", "cros.0.1"):
        with pytest.raises(ConfigError, match=re.escape(name)):
            select_heads(name, layout)
    with pytest.raises(ConfigError, match=r"^'cross\.0'"):
        select_heads("cross.0", layout)


def test_a_plain_name_is_a_missing_file_and_no_trouble_of_the_hub(command: Command) -> None:
    status, _, error = command("show", "no-such-model-of-anybody")
    assert status == 2 and "there is no file or directory no-such-model-of-anybody" in error and "OWNER/NAME" in error
    assert "cannot be reached" not in error


def test_only_what_was_left_out_is_said_to_be(
    command: Command, caption_files: tuple[Path, Path], tmp_path: Path
) -> None:
    given = ("--source", caption_files[0], "--only", "sink", "--bootstrap", 11, "--no-figures", "--device", "cpu")
    status, shown, _ = command("analyze", MODEL, *given, "--out", tmp_path / "run")
    assert status == 0 and "Not measured: cross and decoder-self (need a --target" in shown and "out: all" not in shown


def test_messages_say_nothing_that_is_not_so() -> None:
    assert user_message(MemoryError()) == (
        "there is not enough memory; take a smaller --batch-tokens, --max-length or model"
    )
    with pytest.raises(CheckpointError, match="averaged") as merged:
        require(1.0, 0.1, "the smaller model", merges=True)
    assert "masked" not in str(merged.value)
    with pytest.raises(CheckpointError, match="masked"):
        require(1.0, 0.1, "the smaller model", merges=False)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("analyze model --source text.txt --quiet", "there is no --quiet; results go to stdout, progress"),
        ("analyze model -o run", "there is no -o; give --out"),
        ("analyze --model model", "there is no --model; give CKPT as the first argument"),
        ("evaluate model --ref text.txt", "there is no --ref; give --target"),
        ("plot heads model --text x", "No such option: --text"),
        ("analyze model text.txt --out o", "text.txt is one argument too many; a text is given as --source text.txt"),
        ("translate model text.txt", "translate reads the text from stdin: python translate CKPT < text.txt"),
        ("plot attention model --out a.png", "--heads is missing (Heads of one site"),
        ("prune model", "model stands where a command is expected: python prune COMMAND model …; choose from l0"),
        ("train model", "model stands where a variant is expected: python train VARIANT model …; choose from base"),
        ("plot model", "model stands where a figure is expected: python plot FIGURE model …; choose from heads"),
        ("prune shrnk", "unknown command 'shrnk'; did you mean 'shrink'"),
        ("show modle", "there is no file or directory modle (did you mean model?)"),
        ("analyze model --source txt.txt --out o", "there is no file txt.txt (did you mean text.txt?)"),
        ("plot heads modle --out a.png", "there is no directory modle (did you mean model?)"),
        ("show text.txt", "text.txt is a text; give a checkpoint"),
        (
            f"analyze {MODEL} --source text.txt --parse stanze --out o",
            "there is no file stanze",
        ),
    ],
)
def test_odd_command_lines_are_answered_with_their_cause(
    words: str, answer: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "text.txt").write_text("a b\n", encoding="utf-8")
    status, _, error = command(*words.split())
    program = re.compile(r"python -m \S+|\bheadscope\b")
    assert status == 2 and program.sub("python", error).startswith("error: " + answer), error


def test_list_without_a_kind_lists_the_kinds(command: Command) -> None:
    status, out, _ = command("list", "--json")
    assert status == 0 and {"analyses", "criteria", "metrics"} < json.loads(out).keys()
