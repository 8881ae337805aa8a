"""Labels need evidence: the test against its re-derivation, its level, and random models, which have no functions."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.attribution.objectives.base import OBJECTIVES
from headscope.bootstrap import Bootstrap, Estimate, GroupSums, Ratio
from headscope.config.analyze import AnalyzeConfig
from headscope.data.batching import Omissions, batches
from headscope.engine.base import AnalysisReport
from headscope.engine.evidence.report import LabelTests
from headscope.engine.evidence.significance import adjust, kendall, p_of_difference, p_values, share_p
from headscope.engine.faithfulness.comparison import (
    ORDERS,
    PerformanceDrop,
    RemovalSteps,
    compare_rankings,
    measure_drop,
    plan_removals,
)
from headscope.engine.faithfulness.orders import agreement, order_heads, random_order, shuffle_weights
from headscope.engine.study import run_analysis
from headscope.evaluation.likelihood import LikelihoodOptions
from headscope.heads import HeadId, Site, all_heads
from headscope.model.taps import masked
from tests.makers.studies import study_of
from tests.oracles import checkpoints, evidence, speakers, tiny

SITE_LAYER = (Site.ENCODER_SELF, 0)
LABELLING = ["positional", "syntactic", "rare_words", "sink", "averages"]
LABELLING += ["previous_token", "duplicate_token", "induction"]


def label_heads(hits: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], threshold: float, **options: Any) -> Any:
    """The report on heads of one layer with hits [g h] among counts [g 1], with at least 20 instances by default."""
    sums = GroupSums()
    sums.add(torch.arange(len(hits)), Ratio(torch.from_numpy(hits).double(), torch.from_numpy(counts).double()))
    estimate = options.pop("estimate", None) or Bootstrap(seed=1, replicates=200).ratio(sums)
    report, tests = AnalysisReport(), LabelTests(options.pop("min_instances", 20))
    p = share_p(sums.total[: sums.n_used], sums.count[: sums.n_used], threshold=threshold)
    tests.add(SITE_LAYER, "share", "does", estimate, p, threshold=threshold, counts=sums.count[: sums.n_used])
    p_adjusted = tests.conclude(report)
    return report, p_adjusted


def test_step_up_procedure() -> None:
    rng = np.random.default_rng(3)
    for power in (1, 3, 8):
        p = rng.random(60) ** power
        for level in (0.01, 0.05, 0.2):
            assert set(np.flatnonzero(adjust(p) <= level)) == evidence.bh_rejections(p.tolist(), level)
    with_gaps = np.array([0.01, np.nan, 0.04, np.nan])
    np.testing.assert_allclose(adjust(with_gaps), [0.02, np.nan, 0.04, np.nan])
    np.testing.assert_allclose(adjust(np.array([0.04, 0.041])), [0.041, 0.041])  # the smaller p is no larger


def test_p_is_that_of_its_re_derivation() -> None:
    """Also of differences to a baseline, with sentences without instances, and where all sentences agree."""
    rng = np.random.default_rng(5)
    counts = rng.poisson(2.0, 30)
    hits = rng.binomial(counts[:, None], [0.3, 0.6, 0.9, 1.0])  # the last head never misses
    base = rng.binomial(counts, 0.4)
    for baseline, threshold in ((base, 0.1), (np.zeros(30, dtype=int), 0.5), (np.zeros(30, dtype=int), 0.9)):
        instances = torch.from_numpy(counts[:, None]).double()
        total, base_hits = (torch.from_numpy(part).double() for part in (hits, baseline[:, None]))
        p_by_head = p_values(total, base_hits, instances, threshold=threshold)
        for head, p in enumerate(p_by_head):
            rows = list(zip(hits[:, head].tolist(), baseline.tolist(), counts.tolist(), strict=True))
            assert p == pytest.approx(evidence.p_value(rows, threshold), rel=1e-3), (threshold, head)


def test_a_label_needs_instances_sentences_an_interval_and_more_than_luck() -> None:
    counts = np.full((19, 1), 1)
    report, p_adjusted = label_heads(np.ones((19, 2)), counts, 0.5)
    assert not report.labels and np.isnan(p_adjusted[0]).all()
    assert report.unsupported[HeadId(*SITE_LAYER, 1)] == ["does (19 instances, 20 are needed)"]
    report, _ = label_heads(np.ones((19, 2)), counts, 0.5, min_instances=19)
    assert report.labels == {HeadId(*SITE_LAYER, head): ["does"] for head in (0, 1)} and not report.unsupported
    report, _ = label_heads(np.full((9, 1), 30), np.full((9, 1), 30), 0.5)
    assert report.unsupported == {HeadId(*SITE_LAYER, 0): ["does (270 instances are in 9 sentences, 10 are needed)"]}
    hits = np.tile([[1], [0]], (60, 1))
    hits[::10] = 1  # 0.55 of 120
    report, _ = label_heads(hits, np.ones((120, 1)), 0.5)
    assert report.unsupported[HeadId(*SITE_LAYER, 0)][0].startswith("does (interval from 0.4")
    wide = Estimate(*(np.array([value]) for value in (0.55, -0.0004, 0.56)))
    report, _ = label_heads(hits, np.ones((120, 1)), 0.5, estimate=wide)
    assert report.unsupported[HeadId(*SITE_LAYER, 0)] == ["does (interval from 0.000, below 0.5)"]
    narrow = Estimate(*(np.array([value]) for value in (0.55, 0.54, 0.56)))
    report, p_adjusted = label_heads(hits, np.ones((120, 1)), 0.5, estimate=narrow)
    p = p_adjusted[0][0, 0]
    assert report.unsupported[HeadId(*SITE_LAYER, 0)] == [f"does (p {p:.2g} is {p:.2g} among 1 test)"]
    row = report.evidence[0]
    assert (row["given"], row["threshold"], row["instances"], row["units"], row["tests"]) == (False, 0.5, 120, 120, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "sentences", "per_sentence"), [(0.5, 40, 3), (0.9, 60, 20), (0.2, 30, 1)])
def test_at_the_threshold_one_study_in_twenty_has_a_label(share: float, sentences: int, per_sentence: int) -> None:
    """A hundred heads whose true share is the threshold: the chance of any label is at most 5 % (here with noise)."""
    rng = np.random.default_rng(11)
    studies, heads = 150, 100
    counts = 1 + rng.poisson(per_sentence - 1, (sentences, 1))
    certain = Estimate(*(np.ones(heads) for _ in range(3)))  # the interval objects to nothing: the test is alone
    n_labelled = 0
    for _ in range(studies):
        shares = rng.beta(share * 19, (1 - share) * 19, (sentences, heads))  # correlated within a sentence
        report, _ = label_heads(rng.binomial(counts, shares), counts, share, estimate=certain)
        n_labelled += bool(report.labels)
    assert n_labelled / studies <= 0.10  # 0.05 and two and a half standard deviations


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "models"), [("bert", 2), ("mistral", 2), ("t5", 1)])
def test_random_models_have_no_functions(kind: str, models: int) -> None:
    """Models of random weights on random text, with every analysis that labels: no label."""
    for seed in range(models):
        corpus = tiny.corpus(seed, count=25, target=kind == "t5")
        options: Any = {"ranks": torch.arange(451, 504), "relations": "all", "min_instances": 5, "seed": seed}
        study = study_of(tiny.checkpoint(kind, 40 + seed), corpus, *LABELLING, replicates=20, **options)
        assert len(study.tables["syntactic"]) and study.tables["syntactic"]["p_adjusted"].notna().any()
        assert not study.labels, (seed, study.tables["labels"].to_string())


@pytest.mark.parametrize("rule", ["tested", "published"])
def test_published_rules_label_by_the_estimate_alone(rule: str) -> None:
    study = study_of(
        tiny.checkpoint("bert", 40),
        tiny.corpus(0, count=12),
        "positional",
        "syntactic",
        "rare_words",
        "sink",
        replicates=20,
        ranks=torch.arange(451, 504),
        relations="all",
        min_instances=1,
        label_rule=rule,
    )
    expected: dict[tuple[str, int, int], set[str]] = {}
    for row in study.heads.to_dict("records"):
        head_labels = expected.setdefault((row["site"], row["layer"], row["head"]), set())
        head_labels |= {f"positional:{row['offset']:+.0f}"} if row["offset_share"] >= 0.9 else set()
        head_labels |= {"rare"} if row["rarest_two"] >= 0.5 else set()
    for row in study.tables["syntactic"].to_dict("records"):
        if row["accuracy"] - row["baseline"] >= 0.1:
            expected[row["site"], row["layer"], row["head"]].add(f"syntactic:{row['label']}")
    actual = {(head.site.value, head.layer, head.head): {*labels} for head, labels in study.labels.items()}
    if rule == "published":
        assert any(expected.values()) and actual == {head: labels for head, labels in expected.items() if labels}
        assert not study.unsupported
    else:
        assert not actual and study.unsupported
    for name in ("positional", "syntactic", "rare_words"):
        assert study.record["signatures"][name].get("label-rule") == (rule if rule == "published" else None)
    assert "labels" in study.record["signatures"]["sink"]


def test_differences_from_zero_and_agreement_of_ranks() -> None:
    rng = np.random.default_rng(2)
    totals, counts = rng.normal(0.3, 1.0, (40, 3)), 1.0 + rng.poisson(3, (40, 1))
    totals[:, 2] = 0  # a head that never matters
    p = p_of_difference(torch.from_numpy(totals), torch.from_numpy(counts))
    for head in range(2):
        mean = totals[:, head].sum() / counts.sum()
        squares = sum((x - mean * n) ** 2 for x, n in zip(totals[:, head], counts[:, 0], strict=True))
        error = math.sqrt(40 / 39 * squares) / counts.sum()
        freedom = counts.sum() ** 2 / (counts**2).sum() - 1
        assert p[head] == pytest.approx(2 * evidence.tail(abs(mean) / error, freedom, steps=20_000), rel=1e-3)
    assert p[2] == pytest.approx(1)
    assert np.isnan(p_of_difference(torch.tensor([[0.3, 0.0]]), torch.ones(1, 2))).all()  # one sentence has no variance
    first, second = rng.integers(0, 6, (2, 25)).astype(float)
    pairs = [(i, j) for i in range(25) for j in range(i)]
    signs = [(np.sign(first[i] - first[j]), np.sign(second[i] - second[j])) for i, j in pairs]
    untied_pairs = [sum(sign[side] != 0 for sign in signs) for side in (0, 1)]
    expected = sum(a * b for a, b in signs) / math.sqrt(untied_pairs[0] * untied_pairs[1])
    assert kendall(first, second) == pytest.approx(expected)
    assert math.isnan(kendall(first, np.ones(25)))


# Heads removed in the order of rankings: plans, curves, areas, agreement, shuffled weights.


HEADS = [HeadId(Site.DECODER_SELF, layer, head) for layer in range(2) for head in range(3)][:5]
TRUE = dict(zip(HEADS, (5.0, 1.0, 4.0, 2.0, 3.0), strict=True))
WRONG = {head: -value for head, value in TRUE.items()}


def sums_of(plan: RemovalSteps, drop_of_head: dict[HeadId, float], *, sentences: int = 7) -> GroupSums:
    """Drops add up over the removed heads, sentence n counts n + 1 predictions."""
    sums = GroupSums()
    for n in range(sentences):
        value = torch.tensor([[(n + 1) * (2.0 + sum(drop_of_head[head] for head in off)) for off in plan.masks]])
        sums.add(torch.tensor([n]), Ratio(value.double(), torch.tensor([[n + 1.0]]).double()))
    return sums


def test_tied_heads_share_their_mean_rank_and_a_missing_number_is_no_agreement() -> None:
    """Pearson's correlation of ranks 5 1 4 2 3 and 1 2.5 4 5 2.5, heads in another order."""
    ties = dict(zip(HEADS[::-1], (2.0, 7.0, 4.0, 2.0, 1.0), strict=True))
    expected = np.corrcoef([5, 1, 4, 2, 3], [1, 2.5, 4, 5, 2.5])[0, 1]
    assert agreement(TRUE, ties) == pytest.approx(expected) == agreement(ties, TRUE)
    assert np.isnan(agreement(TRUE, ties | {HEADS[2]: float("nan")}))


def test_areas_against_a_slow_sum() -> None:
    plan = plan_removals({"true": TRUE, "wrong": WRONG}, steps=5, random_orders=3, seed=1)
    rankings, shuffled_scores = {"true": TRUE, "wrong": WRONG}, {"wrong": TRUE}
    drop = PerformanceDrop({"loss": sums_of(plan, TRUE)})
    curves, table = compare_rankings(plan, drop, rankings, shuffled_scores, Bootstrap(seed=1))
    order = [TRUE[head] for head in order_heads(TRUE)]
    gaps = [sum(order[:n]) - sum(order[::-1][:n]) for n in range(6)]
    area = sum((gaps[n] + gaps[n + 1]) / 2 / 5 for n in range(5))
    assert table["ranking"].tolist() == ["true", "wrong"]
    assert table["area"].tolist() == pytest.approx([area, -area])
    assert table["ablation_spearman"].tolist() == pytest.approx([1.0, -1.0])
    assert table["shuffled_spearman"].tolist() == pytest.approx([np.nan, -1.0], nan_ok=True)
    orders = [[TRUE[head] for head in random_order(HEADS, seed=1 + n)] for n in range(3)]
    areas = [
        sum(sum(d[:n]) - sum(d[::-1][:n]) + sum(d[: n + 1]) - sum(d[::-1][: n + 1]) for n in range(5)) / 10
        for d in orders
    ]
    assert table["area_random"][0] == pytest.approx(np.mean(areas))
    assert table["area_random_sd"][0] == pytest.approx(np.std(areas, ddof=1))
    curve = curves[(curves["ranking"] == "true") & (curves["order"] == ORDERS[0])]
    assert curve["harm"].tolist() == pytest.approx(np.cumsum([0, *order]).tolist())
    assert (curve["harm_low"] <= curve["harm"] + 1e-9).all() and (curve["harm"] <= curve["harm_high"] + 1e-9).all()


def test_metrics_that_fall_count_their_fall() -> None:
    plan = plan_removals({"true": TRUE}, steps=2, random_orders=0, seed=1)
    sums = sums_of(plan, {head: -value for head, value in TRUE.items()})
    bleu = np.array([30.0 - len(mask) for mask in plan.masks])
    drop = PerformanceDrop({"loss": sums_of(plan, TRUE), "accuracy": sums}, {"bleu": bleu})
    curves, _ = compare_rankings(plan, drop, {"true": TRUE}, {}, Bootstrap(seed=1))
    last = curves.query("removed == 5").groupby("metric")["harm"].first()
    assert (
        last["accuracy"] == pytest.approx(15) and last["bleu"] == pytest.approx(5) and last["loss"] == pytest.approx(15)
    )


def test_shuffled_weights_come_back() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), shuffle_weights(model, seed=3):
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
    options = LikelihoodOptions(tokens=61, limit=97, hiding="random")
    drop = measure_drop(checkpoint, corpus, masks, options, objective=objective, step=lambda count: None)
    sums = drop.sums[objective]
    total = (sums.total.sum(0) / sums.count.sum(0)).tolist()
    metric = OBJECTIVES.get(objective)(seed=1)
    for index, mask in enumerate(masks):
        damage = count = 0.0
        for batch in batches(corpus, checkpoint, tokens=1, limit=97, omissions=Omissions(), labels=True):
            with torch.no_grad():
                intact = metric.outcome(checkpoint, batch)
                with masked(checkpoint.model, mask):
                    masked_outcome = metric.outcome(checkpoint, batch, intact.aim)
            damage += float(metric.damage(intact, masked_outcome).sum())
            count += float(intact.counts.sum())
        assert total[index] - total[0] == pytest.approx(damage / count, abs=1e-5)
    if objective == "loss":
        assert {"loss", "accuracy"} == set(drop.sums)


@pytest.mark.slow
def test_the_whole_trial(tmp_path: Path) -> None:
    """The tables and the figure of a small BERT in a folder."""
    checkpoint = checkpoints.huggingface("bert-without-head")
    checkpoint.model.float().save_pretrained(tmp_path / "bert")
    checkpoint.tokenizer.save_pretrained(tmp_path / "bert")
    text = tmp_path / "text.en"
    text.write_text("A dog runs over the grass.\nTwo men sit.\n", encoding="utf-8")
    options: Any = {"faithfulness": True, "faithfulness_steps": 2, "faithfulness_seeds": 2, "bootstrap": 20}
    options |= {"only": ("confidence", "magnitude"), "device": "cpu"}
    run_analysis(AnalyzeConfig(checkpoint=str(tmp_path / "bert"), source=text, out=tmp_path / "run", **options))
    table = pd.read_csv(tmp_path / "run" / "faithfulness_rankings.csv")
    assert set(table.ranking) == {"confidence", "magnitude", "magnitude_all"} and table.place.tolist() == [1, 2, 3]
    assert table.area.is_monotonic_decreasing and table.area_random.nunique() == 1
    assert table.shuffled_spearman.between(-1, 1).all() and table.ablation_spearman.between(-1, 1).all()
    curves = pd.read_csv(tmp_path / "run" / "faithfulness.csv")
    assert set(curves.ranking) == {*table.ranking, "random:0", "random:1"}
    assert set(curves.metric) == {"representation"} and set(curves.removed) == {0, 3, 6}
    assert (curves[curves.removed == 0].harm == 0).all() and (curves[curves.removed == 6].harm > 1e-5).all()
    assert (tmp_path / "run" / "figures" / "faithfulness.png").is_file()
