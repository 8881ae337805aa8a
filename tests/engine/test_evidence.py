"""Labels need evidence: the test against its re-derivation, its level, and random models, which have no functions."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headscope.bootstrap import Bootstrap, Estimate, GroupSums, Ratio
from headscope.engine.base import AnalysisReport
from headscope.engine.evidence.labels import LabelTests
from headscope.engine.evidence.significance import adjust, kendall, p_of_difference, p_values, share_p
from headscope.engine.plan import analyze, choose_analyses
from headscope.heads import HeadId, Site
from tests.oracles import evidence, tiny
from tests.oracles.run_options import run_options

PLACE = (Site.ENCODER_SELF, 0)
LABELLING = (
    "positional",
    "syntactic",
    "rare_words",
    "sink",
    "averages",
    "previous_token",
    "duplicate_token",
    "induction",
)


def labelled(hits: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], threshold: float, **options: Any) -> Any:
    """The report on heads of one layer with hits [g h] among counts [g 1], by default with 20 instances needed."""
    sums = GroupSums()
    sums.add(torch.arange(len(hits)), Ratio(torch.from_numpy(hits).double(), torch.from_numpy(counts).double()))
    estimate = options.pop("estimate", None) or Bootstrap(seed=1, replicates=200).ratio(sums)
    report, tests = AnalysisReport(), LabelTests(options.pop("min_instances", 20))
    p = share_p(sums.total[: sums.used], sums.count[: sums.used], threshold=threshold)
    tests.add(PLACE, "share", "does", estimate, p, threshold=threshold, counts=sums.count[: sums.used])
    adjusted = tests.conclude(report)
    return report, adjusted


def test_step_up_procedure() -> None:
    luck = np.random.default_rng(3)
    for power in (1, 3, 8):
        p = luck.random(60) ** power
        for level in (0.01, 0.05, 0.2):
            assert set(np.flatnonzero(adjust(p) <= level)) == evidence.rejected(p.tolist(), level)
    with_gaps = np.array([0.01, np.nan, 0.04, np.nan])
    np.testing.assert_allclose(adjust(with_gaps), [0.02, np.nan, 0.04, np.nan])
    np.testing.assert_allclose(adjust(np.array([0.04, 0.041])), [0.041, 0.041])  # the smaller p is no larger


def test_p_is_that_of_its_re_derivation() -> None:
    """Of differences to a baseline too, with sentences that have no instance, and where sentences agree."""
    luck = np.random.default_rng(5)
    counts = luck.poisson(2.0, 30)
    hits = luck.binomial(counts[:, None], [0.3, 0.6, 0.9, 1.0])  # the last head never misses
    base = luck.binomial(counts, 0.4)
    for baseline, threshold in ((base, 0.1), (np.zeros(30, dtype=int), 0.5), (np.zeros(30, dtype=int), 0.9)):
        instances = torch.from_numpy(counts[:, None]).double()
        total, base_hits = (torch.from_numpy(part).double() for part in (hits, baseline[:, None]))
        found = p_values(total, base_hits, instances, threshold=threshold)
        for head, p in enumerate(found):
            rows = list(zip(hits[:, head].tolist(), baseline.tolist(), counts.tolist(), strict=True))
            assert p == pytest.approx(evidence.p_value(rows, threshold), rel=1e-3), (threshold, head)


def test_a_label_needs_instances_sentences_an_interval_and_more_than_luck() -> None:
    counts = np.full((19, 1), 1)
    report, adjusted = labelled(np.ones((19, 2)), counts, 0.5)
    assert not report.labels and np.isnan(adjusted[0]).all()
    assert report.unsupported[HeadId(*PLACE, 1)] == ["does (19 instances, 20 are needed)"]
    report, _ = labelled(np.ones((19, 2)), counts, 0.5, min_instances=19)
    assert report.labels == {HeadId(*PLACE, head): ["does"] for head in (0, 1)} and not report.unsupported
    report, _ = labelled(np.full((9, 1), 30), np.full((9, 1), 30), 0.5)
    assert report.unsupported == {HeadId(*PLACE, 0): ["does (270 instances are in 9 sentences, 10 are needed)"]}
    hits = np.tile([[1], [0]], (60, 1))
    hits[::10] = 1  # 0.55 of 120
    report, _ = labelled(hits, np.ones((120, 1)), 0.5)
    assert report.unsupported[HeadId(*PLACE, 0)][0].startswith("does (interval from 0.4")
    none = Estimate(*(np.array([value]) for value in (0.55, -0.0004, 0.56)))
    report, _ = labelled(hits, np.ones((120, 1)), 0.5, estimate=none)
    assert report.unsupported[HeadId(*PLACE, 0)] == ["does (interval from 0.000, below 0.5)"]
    sure = Estimate(*(np.array([value]) for value in (0.55, 0.54, 0.56)))
    report, adjusted = labelled(hits, np.ones((120, 1)), 0.5, estimate=sure)
    p = adjusted[0][0, 0]
    assert report.unsupported[HeadId(*PLACE, 0)] == [f"does (p {p:.2g} is {p:.2g} among 1 test)"]
    row = report.evidence[0]
    assert (row["given"], row["threshold"], row["instances"], row["units"], row["tests"]) == (False, 0.5, 120, 120, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "sentences", "per_sentence"), [(0.5, 40, 3), (0.9, 60, 20), (0.2, 30, 1)])
def test_at_the_threshold_one_study_in_twenty_has_a_label(share: float, sentences: int, per_sentence: int) -> None:
    """A hundred heads whose true share is the threshold: the chance of any label is at most 5 % (here with noise)."""
    luck = np.random.default_rng(11)
    studies, heads = 150, 100
    counts = 1 + luck.poisson(per_sentence - 1, (sentences, 1))
    certainly = Estimate(*(np.ones(heads) for _ in range(3)))  # the interval objects to nothing: the test is alone
    given = 0
    for _ in range(studies):
        clustered = luck.beta(share * 19, (1 - share) * 19, (sentences, heads))  # correlated within a sentence
        report, _ = labelled(luck.binomial(counts, clustered), counts, share, estimate=certainly)
        given += bool(report.labels)
    assert given / studies <= 0.10  # 0.05 and two and a half standard deviations


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "models"), [("bert", 5), ("mistral", 5), ("t5", 2)])
def test_random_models_have_no_functions(kind: str, models: int) -> None:
    """Models of random weights on random text, with every analysis that labels: no label."""
    for seed in range(models):
        study = analyze(
            tiny.checkpoint(kind, 40 + seed),
            tiny.corpus(seed, count=25, target=kind == "t5"),
            analyses=choose_analyses(only=LABELLING),
            options=run_options(ranks=torch.arange(451, 504), seed=seed, relations="all", min_instances=5),
            replicates=20,
        )
        assert len(study.tables["syntactic"]) and study.tables["syntactic"]["p_adjusted"].notna().any()
        assert not study.labels, (seed, study.tables["labels"].to_string())


@pytest.mark.parametrize("rule", ["tested", "published"])
def test_published_rules_label_by_the_estimate_alone(rule: str) -> None:
    study = analyze(
        tiny.checkpoint("bert", 40),
        tiny.corpus(0, count=12),
        analyses=choose_analyses(only=("positional", "syntactic", "rare_words", "sink")),
        options=run_options(ranks=torch.arange(451, 504), relations="all", min_instances=1, label_rule=rule),
        replicates=20,
    )
    plain: dict[tuple[str, int, int], set[str]] = {}
    for row in study.heads.to_dict("records"):
        own = plain.setdefault((row["site"], row["layer"], row["head"]), set())
        own |= {f"positional:{row['offset']:+.0f}"} if row["offset_share"] >= 0.9 else set()
        own |= {"rare"} if row["rarest_two"] >= 0.5 else set()
    for row in study.tables["syntactic"].to_dict("records"):
        if row["accuracy"] - row["baseline"] >= 0.1:
            plain[row["site"], row["layer"], row["head"]].add(f"syntactic:{row['label']}")
    found = {(head.site.value, head.layer, head.head): {*labels} for head, labels in study.labels.items()}
    if rule == "published":
        assert any(plain.values()) and found == {head: labels for head, labels in plain.items() if labels}
        assert not study.unsupported
    else:
        assert not found and study.unsupported
    for name in ("positional", "syntactic", "rare_words"):
        assert study.record["signatures"][name].get("label-rule") == (rule if rule == "published" else None)
    assert "labels" in study.record["signatures"]["sink"]


def test_differences_from_zero_and_agreement_of_ranks() -> None:
    luck = np.random.default_rng(2)
    totals, counts = luck.normal(0.3, 1.0, (40, 3)), 1.0 + luck.poisson(3, (40, 1))
    totals[:, 2] = 0  # a head that never matters
    p = p_of_difference(torch.from_numpy(totals), torch.from_numpy(counts))
    for head in range(2):
        mean = totals[:, head].sum() / counts.sum()
        off = sum((x - mean * n) ** 2 for x, n in zip(totals[:, head], counts[:, 0], strict=True))
        error = math.sqrt(40 / 39 * off) / counts.sum()
        freedom = counts.sum() ** 2 / (counts**2).sum() - 1
        assert p[head] == pytest.approx(2 * evidence.tail(abs(mean) / error, freedom, steps=20_000), rel=1e-3)
    assert p[2] == pytest.approx(1)
    assert np.isnan(p_of_difference(torch.tensor([[0.3, 0.0]]), torch.ones(1, 2))).all()  # one sentence has no variance
    first, second = luck.integers(0, 6, (2, 25)).astype(float)
    pairs = [(i, j) for i in range(25) for j in range(i)]
    signs = [(np.sign(first[i] - first[j]), np.sign(second[i] - second[j])) for i, j in pairs]
    untied = [sum(sign[side] != 0 for sign in signs) for side in (0, 1)]
    expected = sum(a * b for a, b in signs) / math.sqrt(untied[0] * untied[1])
    assert kendall(first, second) == pytest.approx(expected)
    assert math.isnan(kendall(first, np.ones(25)))
