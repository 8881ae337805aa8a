"""Damaged files of runs: figures and pages of them are drawn, or refused in one line; nothing ends in a traceback."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pandas as pd
import pytest

from headscope.errors import HeadscopeError
from headscope.files.tables import read_csv
from tests.faults.conftest import Command, one_line
from tests.makers.runs import make_run

LAYOUT = {"encoder-self": [2, 3], "cross": [2]}
WORDS = ("", "abc", "nan", "inf", "-1", "1.5", "1e308", "9" * 20, "True", "[1]", "\x1b[31m")
DRAWN = {"heads.csv": "heads", "positional.csv": "positional", "syntactic.csv": "syntactic"}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A small run of `analyze`."""
    return make_run(tmp_path / "run", LAYOUT)


def damage(text: str, chance: random.Random) -> str:
    """The text of a table with one fault."""
    rows = [line.split(",") for line in text.splitlines()]
    row, column = chance.randrange(1, len(rows)), chance.randrange(len(rows[0]))
    kind = chance.randrange(7)
    if kind < 3:
        rows[row][column] = chance.choice(WORDS)
    elif kind == 3:
        word = chance.choice(WORDS)
        rows[1:] = [[*cells[:column], word, *cells[column + 1 :]] for cells in rows[1:]]
    elif kind == 4:
        rows = [cells[:column] + cells[column + 1 :] for cells in rows]
    elif kind == 5:
        rows.insert(row, rows[row])
    damaged = "".join(",".join(cells) + "\n" for cells in rows)
    return damaged[: chance.randrange(len(damaged))] if kind == 6 else damaged


@pytest.mark.filterwarnings("ignore:You are merging on int and float columns")
@pytest.mark.parametrize("name", DRAWN)
def test_a_damaged_table_is_drawn_or_refused_in_one_line(name: str, run: Path, headscope: Command) -> None:
    chance, whole = random.Random(name), (run / name).read_text(encoding="utf-8")
    for number in range(6):
        (run / name).write_text(damage(whole, chance), encoding="utf-8")
        figure = ["report"] if number % 2 else [DRAWN[name], "--dpi", "30"]
        out = run.parent / ("page.html" if number % 2 else "figure.png")
        status, err = headscope(["plot", *figure, str(run), "--out", str(out), "--force"])
        assert status == 0 or (status == 2 and one_line(err)), (number, err)


@pytest.mark.parametrize("column", ["confidence", "confidence_low", "layer"])
def test_text_among_numbers_is_refused(column: str, run: Path, headscope: Command) -> None:
    table = pd.read_csv(run / "heads.csv").astype({column: object})
    table.loc[[2] if column == "confidence" else list(table.index), column] = "abc"
    table.to_csv(run / "heads.csv", index=False)
    status, err = headscope(["plot", "report", str(run), "--out", str(run.parent / "page.html")])
    assert (status, one_line(err)) == (2, True) and column in err and "numbers" in err


def test_a_table_that_is_cut_off_or_lacks_whole_numbers_is_refused(run: Path, headscope: Command) -> None:
    command = ["plot", "positional", str(run), "--out", str(run.parent / "p.png")]
    path, whole = run / "positional.csv", pd.read_csv(run / "positional.csv")
    for column in ("offset", "count"):
        for value in (float("nan"), 0.5):
            table = whole.astype({column: float})
            table.loc[3, column] = value
            table.to_csv(path, index=False)
            status, err = headscope(command)
            assert (status, one_line(err)) == (2, True) and f"column {column} must hold whole numbers" in err, err
    whole.to_csv(path, index=False)
    text = path.read_text(encoding="utf-8")
    for end in (1, 2, 5, 9, 40):
        path.write_text(text[:-end], encoding="utf-8")
        status, err = headscope(command)
        assert (status, one_line(err)) == (2, True) and "positional.csv is cut off" in err, err


def test_a_column_that_is_there_twice_is_refused_and_texts_of_plugins_are_not() -> None:
    with pytest.raises(HeadscopeError, match=r"a\.1"):
        read_csv(io.StringIO("a,a\n1,2\n"), columns=["a"])
    assert list(read_csv(io.StringIO("a,note\n1,x\n2,y\n"), columns=["a"])["note"]) == ["x", "y"]
    with pytest.raises(HeadscopeError, match="note"):
        read_csv(io.StringIO("a,note\n1,x\n2,5\n"), columns=["a"])
