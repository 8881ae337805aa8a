"""Heads removed in the order of rankings: plans, curves, areas, agreement, shuffled weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import Bootstrap, GroupSums, Ratio
from headscope.config import AnalyzeConfig
from headscope.data.batching import Omissions, batches
from headscope.engine.faithfulness.comparison import (
    ORDERS,
    PerformanceDrop,
    RemovalSteps,
    compare_rankings,
    measure_drop,
    plan_removals,
)
from headscope.engine.faithfulness.orders import agreement, ordered, random_order, randomised, scores_of
from headscope.engine.study import run_analysis
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.heads import HeadId, Site, all_heads
from headscope.model.taps import masked
from tests.oracles import checkpoints, speakers

HEADS = [HeadId(Site.DECODER_SELF, layer, head) for layer in range(2) for head in range(3)][:5]
TRUE = dict(zip(HEADS, (5.0, 1.0, 4.0, 2.0, 3.0), strict=True))
WRONG = {head: -value for head, value in TRUE.items()}


def table(**columns: list[float]) -> pd.DataFrame:
    places = {
        "site": [head.site.value for head in HEADS],
        "layer": [head.layer for head in HEADS],
        "head": [head.head for head in HEADS],
    }
    return pd.DataFrame({**places, **columns, "functions": [""] * 5})


def sums_of(plan: RemovalSteps, drop_of_head: dict[HeadId, float], *, sentences: int = 7) -> GroupSums:
    """Drops add up over the removed heads, sentence n counts n + 1 predictions."""
    sums = GroupSums()
    for n in range(sentences):
        value = torch.tensor([[(n + 1) * (2.0 + sum(drop_of_head[head] for head in off)) for off in plan.masks]])
        sums.add(torch.tensor([n]), Ratio(value.double(), torch.tensor([[n + 1.0]]).double()))
    return sums


def test_rankings_of_a_table() -> None:
    found, refused = scores_of(
        table(
            gradient=[1, 2, 3, 4, 5],
            gradient_low=[0, 1, 2, 3, 4],
            entropy=[1, 2, 3, 4, 6],
            ablation=[1, float("nan"), 1, 1, 2],
            magnitude=[3, 3, 3, 3, 3],
            sink=[1, 2, 3, 4, 5],
        )
    )
    assert set(found) == {"gradient", "entropy"} and set(refused) == {"ablation", "magnitude"}
    assert ordered(found["gradient"]) == HEADS[::-1]
    assert ordered(found["entropy"]) == HEADS  # the sharpest first
    assert "1 of 5 heads" in refused["ablation"] and "same" in refused["magnitude"]


def test_tied_heads_share_their_mean_rank_and_a_missing_number_is_no_agreement() -> None:
    """Pearson's correlation of ranks 5 1 4 2 3 and 1 2.5 4 5 2.5, heads in another order."""
    ties = dict(zip(HEADS[::-1], (2.0, 7.0, 4.0, 2.0, 1.0), strict=True))
    expected = np.corrcoef([5, 1, 4, 2, 3], [1, 2.5, 4, 5, 2.5])[0, 1]
    assert agreement(TRUE, ties) == pytest.approx(expected) == agreement(ties, TRUE)
    assert np.isnan(agreement(TRUE, ties | {HEADS[2]: float("nan")}))


def test_areas_against_a_slow_sum() -> None:
    plan = plan_removals({"true": TRUE, "wrong": WRONG}, steps=5, random_orders=3, seed=1)
    comparison = compare_rankings(
        plan, PerformanceDrop({"loss": sums_of(plan, TRUE)}), {"true": TRUE, "wrong": WRONG}, Bootstrap(seed=1)
    )
    order = [TRUE[head] for head in ordered(TRUE)]
    gaps = [sum(order[:n]) - sum(order[::-1][:n]) for n in range(6)]
    area = sum((gaps[n] + gaps[n + 1]) / 2 / 5 for n in range(5))
    assert comparison.rankings["ranking"].tolist() == ["true", "wrong"]
    assert comparison.rankings["area"].tolist() == pytest.approx([area, -area])
    assert comparison.rankings["ablation_spearman"].tolist() == pytest.approx([1.0, -1.0])
    drawn = [[TRUE[head] for head in random_order(HEADS, seed=1 + n)] for n in range(3)]
    areas = [
        sum(sum(d[:n]) - sum(d[::-1][:n]) + sum(d[: n + 1]) - sum(d[::-1][: n + 1]) for n in range(5)) / 10
        for d in drawn
    ]
    assert comparison.rankings["area_random"][0] == pytest.approx(np.mean(areas))
    assert comparison.rankings["area_random_sd"][0] == pytest.approx(np.std(areas, ddof=1))
    curve = comparison.curves[(comparison.curves["ranking"] == "true") & (comparison.curves["order"] == ORDERS[0])]
    assert curve["harm"].tolist() == pytest.approx(np.cumsum([0, *order]).tolist())
    assert (curve["harm_low"] <= curve["harm"] + 1e-9).all() and (curve["harm"] <= curve["harm_high"] + 1e-9).all()


def test_metrics_that_fall_count_their_fall() -> None:
    plan = plan_removals({"true": TRUE}, steps=2, random_orders=0, seed=1)
    sums = sums_of(plan, {head: -value for head, value in TRUE.items()})
    bleu = np.array([30.0 - len(mask) for mask in plan.masks])
    comparison = compare_rankings(
        plan,
        PerformanceDrop({"loss": sums_of(plan, TRUE), "accuracy": sums}, {"bleu": bleu}),
        {"true": TRUE},
        Bootstrap(seed=1),
    )
    last = comparison.curves.query("removed == 5").groupby("metric")["harm"].first()
    assert (
        last["accuracy"] == pytest.approx(15) and last["bleu"] == pytest.approx(5) and last["loss"] == pytest.approx(15)
    )


def test_shuffled_weights_come_back() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), randomised(model, seed=3):
        weight = model.get_parameter("0.weight")
        assert not torch.equal(weight, before["0.weight"])
        assert torch.equal(weight.flatten().sort().values, before["0.weight"].flatten().sort().values)
        raise KeyError
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "objective"), [("t5", "loss"), ("native-pre", "loss"), ("gpt2", "top1"), ("bert", "loss")]
)
def test_the_drop_is_that_of_masked_heads(kind: str, objective: str) -> None:
    """All masks in one pass equal a pass of their own under `masked`."""
    checkpoint, corpus = speakers.checkpoint(kind), speakers.corpus(kind, count=5)
    heads = list(all_heads(checkpoint.layout))
    masks = [[], heads[:1], heads[1:4], heads]
    reading = LikelihoodOptions(tokens=61, limit=97, hiding="random")
    found = measure_drop(checkpoint, corpus, masks, reading, objective=objective, step=lambda count: None)
    sums = found.sums[objective]
    total = (sums.total.sum(0) / sums.count.sum(0)).tolist()
    asked = OBJECTIVES.get(objective)(seed=1)
    for place, off in enumerate(masks):
        worth = count = 0.0
        for batch in batches(corpus, checkpoint, tokens=1, limit=97, losses=Omissions(), labels=True):
            with torch.no_grad():
                intact = asked.outcome(checkpoint, batch)
                with masked(checkpoint.model, off):
                    altered = asked.outcome(checkpoint, batch, intact.aim)
            worth += float(asked.damage(intact, altered).sum())
            count += float(intact.counts.sum())
        assert total[place] - total[0] == pytest.approx(worth / count, abs=1e-5)
    if objective == "loss":
        assert {"loss", "accuracy"} == set(found.sums)


@pytest.mark.slow
def test_the_whole_trial(tmp_path: Path) -> None:
    """Of a small BERT in a folder: tables and figure."""
    made = checkpoints.hugging("bert-without-head")
    made.model.float().save_pretrained(tmp_path / "bert")  # type: ignore[operator]
    made.tokenizer.save_pretrained(tmp_path / "bert")
    text = tmp_path / "text.en"
    text.write_text("A dog runs over the grass.\nTwo men sit.\n", encoding="utf-8")
    names = ("confidence", "magnitude")
    config = AnalyzeConfig(
        checkpoint=str(tmp_path / "bert"),
        source=text,
        out=tmp_path / "run",
        only=names,
        faithfulness=True,
        faithfulness_steps=2,
        faithfulness_seeds=2,
        bootstrap=20,
        device="cpu",
    )
    run_analysis(config)
    table = pd.read_csv(tmp_path / "run" / "faithfulness_rankings.csv")
    assert set(table.ranking) == {"confidence", "magnitude", "magnitude_all"} and table.place.tolist() == [1, 2, 3]
    assert table.area.is_monotonic_decreasing and table.area_random.nunique() == 1
    assert table.shuffled_spearman.between(-1, 1).all() and table.ablation_spearman.between(-1, 1).all()
    curves = pd.read_csv(tmp_path / "run" / "faithfulness.csv")
    assert set(curves.ranking) == {*table.ranking, "random:0", "random:1"}
    assert set(curves.metric) == {"representation"} and set(curves.removed) == {0, 3, 6}
    assert (curves[curves.removed == 0].harm == 0).all() and (curves[curves.removed == 6].harm > 1e-5).all()
    assert (tmp_path / "run" / "figures" / "faithfulness.png").is_file()
