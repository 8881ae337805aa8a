"""How estimates agree with exact effects: on the heads that have one, not on those whose order is noise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from headscope.bootstrap import Bootstrap, GroupSums, Ratio
from headscope.config.declarations import measure_of
from headscope.engine.evidence.need import need_table, told_agreement
from headscope.heads import Site
from headscope.results.study_answers import prompts

PLACE = (Site.DECODER_SELF, 0)
EFFECTS = [2.5, 2.0, 1.5, 1.0, *[0.0] * 36]
TURNED = [-0.4, 0.2, 0.7, 1.2, *[0.0] * 36]
"""An estimate that has the right heads, in the wrong order."""


def tables(count: int) -> tuple[pd.DataFrame, pd.DataFrame, list[Any]]:
    """Of prompts whose effects scatter: the test of every head, the agreement, and the means of both measures."""
    noise = torch.Generator().manual_seed(3)
    values = {
        name: torch.tensor(effects) + scale * torch.randn(count, len(effects), generator=noise)
        for name, effects, scale in (("patching", EFFECTS, 0.2), ("eap_ig", TURNED, 1e-3))
    }
    sums: dict[Any, GroupSums] = {}
    heads = pd.DataFrame({"site": PLACE[0].value, "layer": 0, "head": range(len(EFFECTS)), "functions": ""})
    for name, drawn in values.items():
        sums[(name, *PLACE)] = GroupSums()
        sums[(name, *PLACE)].add(torch.arange(count), Ratio(drawn.double(), torch.ones(count, 1, dtype=torch.float64)))
        heads = heads.assign(**{name + end: drawn.double().mean(0).numpy() for end in ("", "_low", "_high")})
    need = need_table(heads, [measure_of(name) for name in values], sums)
    return need, told_agreement(need, sums, Bootstrap(seed=1, replicates=50)), [heads[name] for name in values]


def test_agreement_is_said_of_heads_that_are_told_from_zero() -> None:
    need, agreement, (exact, estimate) = tables(30)
    tests = need[need["measure"] == "patching"]
    told = (tests["p_adjusted"] <= 0.05).to_numpy()
    (row,) = agreement.to_dict("records")
    assert told[:4].all() and row["heads"] == told.sum() < 8
    pair = exact[told], estimate[told]
    assert row["spearman"] == pytest.approx(spearmanr(*pair).statistic)
    assert row["pearson"] == pytest.approx(pearsonr(*pair).statistic)
    assert row["pearson_low"] <= row["pearson"] <= row["pearson_high"]
    assert spearmanr(*pair).statistic < spearmanr(exact, estimate).statistic + 1e-9


def answers(count: int, agreement: pd.DataFrame, need: pd.DataFrame) -> list[str]:
    made = {"patching": need, "patching_agreement": agreement}
    study: Any = SimpleNamespace(
        tables=made, has_table=made.__contains__, sentences=count, labels={}, short_name=lambda name: name
    )
    return [answer.sentence for answer in prompts(study)]


def test_few_prompts_are_named_as_the_reason() -> None:
    need, agreement, _ = tables(30)
    first, second = answers(30, agreement, need)
    assert "can be told from zero" in first and second.startswith("on the ") and "Pearson of sizes" in second
    none = need.assign(p_adjusted=1.0)
    (few,) = answers(4, agreement, none)
    assert few == "4 prompts are too few to tell a head from zero; give 10 or more"
    (many,) = answers(40, agreement, none)
    assert many == "no head can be told from zero with 40 prompts (40 heads tested)"


def test_one_head_has_no_correlation() -> None:
    need, _, _ = tables(30)
    alone = need.assign(p_adjusted=[0.01] + [1.0] * (len(need) - 1))
    sums = {("patching", *PLACE): GroupSums(), ("eap_ig", *PLACE): GroupSums()}
    for each in sums.values():
        each.add(torch.arange(9), Ratio(torch.rand(9, 40).double(), torch.ones(9, 1).double()))
    (row,) = told_agreement(alone, sums, Bootstrap(seed=1, replicates=9)).to_dict("records")
    assert row["heads"] == 1 and row["spearman"] != row["spearman"] and row["pearson"] != row["pearson"]
