"""A model that writes is judged by states of its encoder where there is no target: that is said first, in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import headscope as hs
from headscope.attribution.objectives.base import choose_objective
from headscope.errors import QuestionWarning
from tests.oracles import speakers

Command = Callable[..., tuple[int, str, str]]
SAID = "no --target: heads are judged by states of the encoder"


@pytest.mark.parametrize(
    ("kind", "given", "warns"),
    [
        ("marian", {}, True),
        ("t5", {}, True),
        ("native-pre", {}, True),
        ("marian", {"has_target": True}, False),
        ("marian", {"name": "representation"}, False),
        ("marian", {"has_answers": True}, False),
        ("gpt2", {}, False),
    ],
)
def test_said_of_models_that_write_what_a_target_would_say(kind: str, given: dict[str, Any], warns: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        choose_objective(**{"name": "", "checkpoint": speakers.checkpoint(kind), "has_target": False, **given})
    said = [str(entry.message) for entry in caught if entry.category is QuestionWarning]
    assert len(said) == warns and all(line.startswith(SAID) and line.endswith("give --target FILE") for line in said)


def test_python_warns() -> None:
    model = hs.load(hs.assets.trained())
    with pytest.warns(QuestionWarning, match="give --target FILE"):
        model.analyze(["A dog runs on the grass.", "Two men sit."], only=["gradient"], bootstrap=9)


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
