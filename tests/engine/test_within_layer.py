"""Measures that compare the heads of one layer order no heads of several layers, wherever heads are ordered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from headscope.config.declarations import measure_of
from headscope.engine.evidence.need import agreement_table, function_need_table, need_table
from headscope.engine.plan import analyze, choose_analyses
from headscope.pruning.ranking.criterion import ScoringContext, criterion_named
from headscope.report.page.heads import measures as measures_of_page
from headscope.results.study_answers import main_importance, needed
from tests.oracles import speakers
from tests.oracles.run_options import run_options

WITHIN = ("gradient", "lrp", "contribution", "contribution_sum")


def table(*names: str) -> pd.DataFrame:
    heads = pd.DataFrame({"site": "cross", "layer": [0, 0, 0, 1, 1, 1], "head": [0, 1, 2] * 2, "functions": ""})
    values = [0.5, 0.9, 0.1, 0.2, 0.7, 0.6]
    columns = {name + end: values for name in names for end in ("", "_low", "_high")}
    return heads.assign(**columns, functions=["sink", *[""] * 5])


@pytest.mark.parametrize("name", WITHIN)
def test_shares_within_a_layer_order_no_heads_of_several(name: str) -> None:
    measure, taylor = measure_of(name), measure_of("taylor")
    assert measure.words.endswith(", within its layer") and not measure.orders and taylor.orders
    heads = table(name, "taylor")
    need = need_table(heads, [measure, taylor], {})
    assert need[need["measure"] == name]["rank"].tolist() == [2, 1, 3, 3, 1, 2]  # in the layer
    assert need[need["measure"] == "taylor"]["rank"].tolist() == [4, 1, 6, 5, 2, 3]
    assert agreement_table(heads, [measure, taylor]).empty
    assert set(function_need_table(heads, [measure, taylor])["measure"]) == {"taylor"}
    run: Any = SimpleNamespace(heads=heads, measures=[name, "taylor"], has_table=lambda _: False)
    shown = measures_of_page(run)
    assert [one["name"] for one in shown if one["importance"]] == ["taylor"]
    assert shown[0]["title"].endswith(", within its layer") and shown[0]["places"] == [2, 1, 3, 3, 1, 2]
    both, alone = need, need[need["measure"] == name]
    study, bare = (SimpleNamespace(tables={"importance": part}, has_table=lambda _: True) for part in (both, alone))
    assert main_importance(study) == taylor and main_importance(bare) is None and not [*needed(bare)]  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["gpt2", "native-pre"])
def test_a_ranking_by_gradient_is_without_the_norm(kind: str) -> None:
    """By the mean of absolute gradients, which `tests/analyses/test_importance.py` derives."""
    its, corpus = speakers.checkpoint(kind), speakers.corpus(kind)
    options = run_options(seed=1)
    found = analyze(its, corpus, analyses=choose_analyses(only=["gradient"]), options=options, replicates=9).heads
    scores = criterion_named("gradient").scores(ScoringContext(its, corpus, options=options))
    assert [*scores.values()] == pytest.approx(found["gradient_raw"].tolist(), rel=1e-9)
    order = [np.argsort(-found[name], kind="stable").tolist() for name in ("gradient", "gradient_raw")]
    assert order[0] != order[1]
