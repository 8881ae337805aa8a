"""What commands say of files that are not there, before anything heavy is imported, and of what they left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs

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


@pytest.mark.slow
def test_a_missing_text_is_said_before_torch_is_imported(python: Callable[..., str], tmp_path: Path) -> None:
    said = python("-c", IN_A_PROCESS.format(commands=list(COMMANDS.values()))).splitlines()
    assert [line.split()[1:] for line in said] == [["2", "False"]] * len(COMMANDS)


def test_list_without_a_kind_lists_the_kinds(command: Command) -> None:
    status, out, _ = command("list", "--json")
    assert status == 0 and {"analyses", "criteria", "metrics"} < json.loads(out).keys()
