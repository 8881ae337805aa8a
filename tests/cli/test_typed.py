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
from headscope.errors import ConfigError, DataError
from headscope.report.figures.glance import draw_matrices, mosaic
from headscope.report.registry import find_figure
from headscope.report.sheet import Sheet
from headscope.report.styles import FigureStyle
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


def test_where_stdin_cannot_be_read(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    with pytest.raises(ConfigError, match=r"--target -.*--source -"):
        typed_text({"source": "x", "target": DASH})
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError):
        typed_text({"source": DASH, "target": None})
    monkeypatch.delenv("WORLD_SIZE")
    for words, said in (
        (
            ("analyze", "x", "--source", "-", "--labels", "-"),
            "--labels - would be stdin, and only --source and",
        ),
        (("evaluate", "x", "--source", "-"), "--source - would be stdin, and only analyze and translate read it"),
    ):
        status, _, err = command(*words, "--out", "unused")
        assert (status, len(err.splitlines())) == (2, 1) and said in err


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


def test_a_glance_has_a_gap_after_every_matrix() -> None:
    layers = [np.full((2, 3, 5), 0.25), np.full((1, 3, 5), 0.5)]
    assert mosaic(layers).shape == (2 * 4, 2 * 6) and np.isnan(mosaic(layers)[3]).all()
    assert np.nansum(mosaic(layers)) == pytest.approx(15 * (0.25 * 2 + 0.5))
    with FigureStyle().in_use():
        sheet = Sheet(FigureStyle())
        draw_matrices(sheet, {"cross": layers}, "a b c")
    assert len(sheet.axes[0].patches) == 3  # the second layer has one head
    with pytest.raises(ConfigError, match="site"):
        draw_matrices(sheet, {}, "a")
