"""An option that is given twice is refused: no value is dropped without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("analyze x --out y --only confidence --only entropy", "--only"),
        ("analyze x --out y --skip confidence --seed 1 --skip entropy", "--skip"),
        ("prune remove x --out y --heads cross.0.0 --heads cross.0.1", "--heads"),
        ("prune rank x --out y --by random --protect a --protect=b", "--protect"),
        ("evaluate x --source a --source b", "--source"),
        ("translate x --mask a --mask b", "--mask"),
        ("show x --mask a --mask b", "--mask"),
        ("train mixing+swap --out y --seed 1 --seed 2", "--seed"),
        ("plot attention x --out y --index 1 --heads a --heads b", "--heads"),
        ("plot positional x --out y --out z", "--out"),
    ],
)
def test_an_option_given_twice_is_refused(command: Command, words: str, name: str) -> None:
    status, out, err = command(*words.split())
    assert (status, out) == (2, "")
    assert err == f"error: {name} is given 2 times; give it once, a list as a,b,c\n"


def test_a_flag_may_be_repeated_and_an_argument_may_be_many(command: Command) -> None:
    """The first thing that is wrong here is that there are no such runs."""
    _, _, err = command("plot", "heads", "a", "b", "--out", "x/{run}.png", "--force", "--force")
    assert err.startswith("error: a is no directory")
