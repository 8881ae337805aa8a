"""Functions × importances over models: by loops over pairs of heads."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from headscope.config.declarations import Measure
from headscope.engine.evidence.need import need_over_models

T = 4.302652729911275  # of Student with 2 degrees of freedom, 0.975
MEASURES = [Measure("gradient", keep="highest"), Measure("shy", keep="lowest")]


def model(seed: int, functions: list[str]) -> pd.DataFrame:
    luck = np.random.default_rng(seed)
    values = luck.normal(size=(len(functions), 2)).round(1)
    values[0, 0] = np.nan
    return pd.DataFrame({"functions": functions, "gradient": values[:, 0], "shy": values[:, 1]})


def pairs(heads: pd.DataFrame, column: str, sign: int, family: str) -> float:
    known = heads[heads[column].notna()]
    own = [family in cell for cell in known["functions"]]
    more = [
        (sign * a > sign * b) + (a == b) / 2
        for a, mine in zip(known[column], own, strict=True)
        for b, theirs in zip(known[column], own, strict=True)
        if mine and not theirs
    ]
    return float(np.mean(more))


def test_means_and_intervals_over_models() -> None:
    labels = [["", "sink", "sink;rare", "rare", "", "sink", ""], ["sink", "", "", "sink", "rare"], ["rare", "", "sink"]]
    models = [model(seed, functions) for seed, functions in enumerate(labels)]
    table = need_over_models([(heads, MEASURES) for heads in models])
    found = {(row["name"], row["measure"]): row for row in table.to_dict("records")}
    for column, sign in (("gradient", 1), ("shy", -1)):
        row = found["sink", column]
        each = [pairs(heads, column, sign, "sink") for heads in models]
        assert list(row["each"]) == pytest.approx(each) and row["needed"] == pytest.approx(np.mean(each))
        reach = T * np.std(each, ddof=1) / 3**0.5
        ends = np.mean(each) - reach, np.mean(each) + reach
        assert (row["needed_low"], row["needed_high"]) == pytest.approx(np.clip(ends, 0, 1)) and row["models"] == 3
    assert found["rare", "gradient"]["models"] == 2  # of the third model the one such head has no number
