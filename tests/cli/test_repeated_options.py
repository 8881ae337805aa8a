"""A list that is given twice is refused: no part of it is dropped without a word."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("analyze x --out y --only confidence --only entropy", "--only"),
        ("analyze x --out y --skip confidence --seed 1 --skip entropy", "--skip"),
        ("analyze x --out y --also lrp --also gradient", "--also"),
        ("prune remove x --out y --heads cross.0.0 --heads cross.0.1", "--heads"),
        ("prune rank x --out y --by random --protect a --protect=b", "--protect"),
        ("prune sweep x --out y --keep 4 --keep 8", "--keep"),
        ("evaluate x --source a --metrics bleu --metrics chrf", "--metrics"),
        ("translate x --mask a --mask b", "--mask"),
        ("show x --mask a --mask b", "--mask"),
        ("plot attention x --out y --index 1 --heads a --heads b", "--heads"),
    ],
)
def test_a_list_given_twice_is_refused(command: Command, words: str, name: str) -> None:
    status, out, err = command(*words.split())
    assert (status, out) == (2, "")
    assert err.startswith(f"error: {name} ") and err.endswith(f"{name} a,b,c\n") and err.count("\n") == 1


def test_a_second_file_of_options_is_refused(command: Command) -> None:
    """Its first one would be dropped whole."""
    status, _, err = command("analyze", "x", "--out", "y", "--config", "a.toml", "--config", "b.toml")
    assert (status, err) == (2, "error: --config is given 2 times; give it once\n")


def test_the_last_of_other_options_counts(command: Command) -> None:
    assert "there is no file or directory a/b/c" in command("show", "a/b/c", "--device", "none", "--device", "cpu")[2]


def test_a_flag_may_be_repeated_and_an_argument_may_be_many(command: Command) -> None:
    """The first thing that is wrong here is that there are no such runs."""
    _, _, err = command("plot", "heads", "a", "b", "--out", "x/{run}.png", "--force", "--force")
    assert err.startswith("error: there is no directory a")
