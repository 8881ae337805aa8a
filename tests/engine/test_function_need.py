"""Functions beside importances: means, Welch's intervals and chances, against loops and enumeration."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from headscope.config.declarations import Measure
from headscope.engine.evidence.need import function_need_table

NEEDED = Measure("need", keep="highest")
LEAST = Measure("need", keep="lowest")


def heads_of(functions: list[str], need: list[float], **more: list[float]) -> pd.DataFrame:
    places = {"site": "encoder-self", "layer": 0, "head": range(len(need))}
    return pd.DataFrame(places | {"functions": functions, "need": need} | more)


def row_of(table: pd.DataFrame, name: str) -> dict[str, float]:
    (row,) = table[table["name"] == name].to_dict("records")
    return {str(key): value for key, value in row.items()}


def test_means_and_intervals_are_those_of_tables() -> None:
    """Student's t of 2 and 4 degrees at 97.5 %: 4.302653 and 2.776445."""
    table = function_need_table(heads_of(["sink"] * 3 + [""] * 3, [1, 2, 3, 4, 5, 6]), [NEEDED])
    row = row_of(table, "sink")
    assert (row["heads"], row["others"], row["mean"], row["others_mean"], row["difference"]) == (3, 3, 2, 5, -3)
    assert row["mean_high"] - 2 == pytest.approx(4.302653 * (1 / 3) ** 0.5, rel=1e-6)
    assert row["difference_low"] == pytest.approx(-3 - 2.776445 * (2 / 3) ** 0.5, rel=1e-6)
    assert (row["first"], row["of_first"], row["p_first"]) == (0, 1, 1)
    other = row_of(table, "no label")
    assert other["difference_high"] == pytest.approx(-row["difference_low"]) and other["first"] == 1


@pytest.mark.parametrize("measure", [NEEDED, LEAST])
def test_chances_are_those_of_all_draws(measure: Measure) -> None:
    random = np.random.default_rng(3)
    need = [*random.normal(size=12), np.nan]
    functions = ["a:1", "a:2;b", "", "b", "a:1", "", "", "", "a:2", "", "", "c", "b"]
    table = function_need_table(heads_of(functions, need), [measure])
    assert table["name"].tolist() == ["a", "a:1", "a:2", "b", "c", "no label"]
    sign = -1 if measure.keep == "highest" else 1
    order = sorted(range(12), key=lambda head: sign * need[head])
    for name in table["name"]:
        row = row_of(table, name)
        own = {head for head in range(12) if (name in functions[head] if name != "no label" else not functions[head])}
        hits = len(own & {*order[:3]})
        draws = [len(own & {*drawn}) >= hits for drawn in combinations(range(12), 3)]
        assert (row["heads"], row["others"], row["first"], row["of_first"]) == (len(own), 12 - len(own), hits, 3)
        assert row["p_first"] == pytest.approx(np.mean(draws))
        assert row["mean"] == pytest.approx(np.mean([need[head] for head in own]))
        assert np.isnan(row["mean_low"]) == (len(own) < 3), "of two heads there is no interval"


def test_what_explains_heads_mostly_is_a_group() -> None:
    shares = {"explained": [0.9, 0.8, 0.2, np.nan], "explained_position": [0.9, 0.1, 0.2, np.nan]}
    lexical = {"explained_lexical": [0.0, 0.7, 0.0, np.nan]}
    table = function_need_table(heads_of([""] * 4, [1, 2, 3, 4], **shares, **lexical), [NEEDED])
    assert table[["kind", "name", "heads", "others"]].values.tolist() == [
        ["mostly", "only the sentence", 1, 3],
        ["mostly", "pairs of words", 1, 3],
        ["mostly", "position and sinks", 1, 3],
    ]
