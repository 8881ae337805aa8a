"""Sentences that are typed in or piped in, in the place of files."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headscope.assets import trained
from headscope.cli.analyze import typed_text
from headscope.errors import DataError
from headscope.report.registry import find_figure
from headscope.results.study import Study

Command = Callable[..., tuple[int, str, str]]
DASH = "-"


def stdin(monkeypatch: pytest.MonkeyPatch, text: str, *, terminal: bool = False) -> None:
    """`text` is on stdin."""
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_pipe_gives_lines_and_pairs_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "a b\nc\n")
    assert typed_text({"source": DASH, "target": "x"}) == {"source": ["a b", "c"]}
    stdin(monkeypatch, "a b\tx\nc\ty z")
    assert typed_text({"source": DASH, "target": DASH}) == {"source": ["a b", "c"], "target": ["x", "y z"]}
    assert typed_text({"source": "x", "target": None}) == {}


def test_a_terminal_is_asked_until_an_empty_line(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stdin(monkeypatch, "a b\nx\nc\ny\n\nnever\n", terminal=True)
    assert typed_text({"source": DASH, "target": DASH}) == {"source": ["a b", "c"], "target": ["x", "y"]}
    said = capsys.readouterr()
    assert said.err.count("its translation: ") == 2 and said.out == ""


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", None, "stdin"),
        ("a\n\nb\n", None, "stdin:2:"),
        ("a\tx\nb\n", DASH, "stdin:2:.*--source.*--target"),
        ("a\t\n", DASH, "stdin:1:"),
    ],
)
def test_what_a_pipe_must_hold(text: str, target: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, text)
    with pytest.raises(DataError, match=message):
        typed_text({"source": DASH, "target": target})


@pytest.mark.slow
def test_a_typed_sentence_makes_the_page_and_stays_with_the_run(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    out, source, target = tmp_path / "run", "A dog plays on the beach .", "Ein Hund spielt am Strand ."
    stdin(monkeypatch, f"{source}\t{target}\n")
    options = ("--only", "confidence", "--bootstrap", 20, "--no-figures")
    status, _, _ = command("analyze", trained(), "--source", "-", "--target", "-", "--out", out, *options)
    assert status == 0 and (out / "report.html").is_file()
    typed = json.loads((out / "run.json").read_text(encoding="utf-8"))["options"]["typed"]
    assert typed == {"source": [source], "target": [target]}
    run = Study.open(out)
    assert run.data == "typed in → typed in, 1 sentence"
    (example,) = run.examples
    assert {site: weights.shape[0] for site, weights in example.weights.items()} == dict.fromkeys(
        ("encoder-self", "decoder-self", "cross"), 24
    )
    figure = find_figure("glance").drawn([run], find_figure("glance").Options(index=0))
    drawn = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert len(drawn) == 3
    _, t, s = example.weights["cross"].shape
    kept = example.weights["cross"][8 + 2] / 255  # layer 1, head 2
    down, across = drawn[2].shape[0] // 3, drawn[2].shape[1] // 8
    assert drawn[2][down : down + t, 2 * across : 2 * across + s] == pytest.approx(kept, abs=1 / 255)
