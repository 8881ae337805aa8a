"""A model that writes is judged by states of its encoder where there is no target: that is said first, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

import headscope as hs
from headscope.errors import QuestionWarning

Command = Callable[..., tuple[int, str, str]]
SAID = "no --target: heads are judged by states of the encoder"


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", [("analyze", "--only", "gradient"), ("prune", "rank", "--by", "magnitude", "--keep-fraction", 0.5)]
)
def test_commands_say_so_first(line: tuple[object, ...], tmp_path: Path, command: Command) -> None:
    source = tmp_path / "text.en"
    source.write_text("A dog runs on the grass.\nTwo men sit.\n")
    words = [*line[: 1 + (line[0] == "prune")], hs.assets.trained(), *line[1 + (line[0] == "prune") :]]
    _, _, said = command(*words, "--source", source, "--out", tmp_path / "run")
    assert said.splitlines()[0].startswith(SAID) and said.count(SAID) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuestionWarning)
        command(*words, "--source", source, "--target", source, "--out", tmp_path / "both")
