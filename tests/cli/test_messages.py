"""What commands say of files that are not there, before anything heavy is imported, and of what they left out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope.cli.failures import described
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
    assert status == 0 and "left out: cross and decoder-self (need a --target" in shown and "out: all" not in shown


def test_messages_say_nothing_that_is_not_so() -> None:
    assert described(MemoryError()) == (
        "there is not enough memory; take a smaller --batch-tokens, --max-length or model"
    )
    with pytest.raises(CheckpointError, match="averaged") as merged:
        require(1.0, 0.1, "the smaller model", merges=True)
    assert "masked" not in str(merged.value)
    with pytest.raises(CheckpointError, match="masked"):
        require(1.0, 0.1, "the smaller model", merges=False)
