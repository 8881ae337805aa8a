"""Verdicts of non-inferiority: limits and power against brute force, margins, and what too little text can say."""

from __future__ import annotations

import math

import numpy as np
import pytest

from headscope.bootstrap import Bootstrap, student_quantile
from headscope.errors import ConfigError
from headscope.evaluation.comparison import resampled
from headscope.evaluation.margin import Margin
from headscope.evaluation.metrics.base import METRICS
from headscope.evaluation.non_inferiority import judge
from tests.oracles import non_inferiority


@pytest.mark.parametrize("name", ["perplexity", "accuracy"])
@pytest.mark.parametrize("sentences", [2, 4, 13, 31])
@pytest.mark.parametrize("harm", [0.0, 0.02, 0.5])
def test_verdicts_equal_brute_force(name: str, sentences: int, harm: float) -> None:
    luck = np.random.default_rng(sentences)
    counts = luck.integers(2, 9, size=sentences).astype(float)
    whole = np.stack([luck.uniform(0.2, 0.9, sentences) * counts, counts], axis=1)
    pruned = whole.copy()
    better = METRICS.get(name).higher_is_better
    pruned[:, 0] += (-1 if better else 1) * harm * luck.uniform(-0.5, 1.5, sentences)
    bootstrap, metric = Bootstrap(seed=5, replicates=43), METRICS.get(name)
    values, reference = (resampled(metric, sums, bootstrap) for sums in (pruned, whole))
    found = judge(metric.worse(values, reference), margin=0.03, baseline=float(reference[0]), groups=sentences)

    def value(sums: list[list[float]]) -> float:
        ratio = sum(total for total, _ in sums) / sum(count for _, count in sums)
        return ratio if better else math.exp(ratio)

    expected = non_inferiority.judged(
        value, [(whole.tolist(), pruned.tolist())], margin=0.03, seed=5, replicates=43, higher_is_better=better
    )
    assert found.verdict == expected.pop("verdict")
    for column, number in expected.items():
        assert getattr(found, column) == pytest.approx(number, rel=1e-4, abs=1e-9), column
    if harm == 0:
        assert found.verdict == "not established" and found.worse == 0


def test_the_verdict_is_where_the_limits_are() -> None:
    luck = np.random.default_rng(1)
    worse = np.concatenate([[0.2], luck.normal(0.2, 0.1, 4000)])
    limits = {"non-inferior": 0.4, "not established": 0.25, "worse": 0.02}
    for verdict, margin in limits.items():
        found = judge(worse, margin=margin, baseline=30.0, groups=1000)
        assert found.verdict == verdict and found.worse == 0.2 and found.margin == margin
        assert found.worse_limit == pytest.approx(0.2 + 1.645 * 0.1, abs=0.01)
        assert found.detectable == pytest.approx((1.645 + 0.842) * 0.1, rel=0.04)
    assert judge(worse - 9, margin=0.0, baseline=30.0, groups=1000).verdict == "non-inferior"


def test_four_in_five_texts_confirm_the_margin_that_is_called_detectable() -> None:
    """Texts of 100 sentences whose losses have mean 0 and deviation 2: the standard error is 0.2."""
    detectable = judge(
        np.concatenate([[0.0], np.random.default_rng(3).normal(0, 0.2 * math.sqrt(0.99), 20_000)]),
        margin=1.0,
        baseline=30.0,
        groups=100,
    ).detectable
    share = non_inferiority.share_confirmed(lambda random: random.normal(0, 2, 100).tolist(), detectable, texts=4000)
    assert share == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize("sentences", [7, 60])
def test_a_loss_as_large_as_the_margin_is_seldom_called_none(sentences: int) -> None:
    """At most for one text in twenty, also of few sentences; a fifth of that loss is seldom called worse."""
    luck, bootstrap, texts = np.random.default_rng(11), Bootstrap(seed=2, replicates=199), 600
    draws = np.vstack([np.ones(sentences), bootstrap.draws(sentences).numpy()])
    verdicts = {1.0: 0, 0.2: 0}
    for loss, wrong in ((1.0, "non-inferior"), (0.2, "worse")):
        for _ in range(texts):
            losses = luck.normal(loss, 1.5, sentences)
            found = judge(draws @ losses / sentences, margin=1.0, baseline=20.0, groups=sentences)
            verdicts[loss] += found.verdict == wrong
    assert verdicts[1.0] / texts < 0.05 + 3 * math.sqrt(0.05 * 0.95 / texts) and verdicts[0.2] / texts < 0.05


@pytest.mark.parametrize(("sentences", "established"), [(1, False), (4, False), (290, False), (310, True)])
def test_where_nothing_differs_the_rule_of_three_says_how_many_sentences_are_enough(
    sentences: int, established: bool
) -> None:
    found = judge(np.zeros(1001), margin=0.35, baseline=35.0, groups=sentences)
    assert (found.verdict == "non-inferior") is established
    assert found.worse == 0 and found.detectable == found.worse_limit
    assert (1 - found.detectable / 35) ** sentences == pytest.approx(0.05)  # as likely is a text that misses them all
    assert found.detectable <= 35 * 3 / sentences


def test_metrics_that_are_not_finite() -> None:
    inf, nan = float("inf"), float("nan")
    assert judge(np.array([inf, inf, 3.0]), margin=1.0, baseline=30.0, groups=9).verdict == "worse"
    assert judge(np.array([1.0, nan, 3.0]), margin=1.0, baseline=30.0, groups=9).verdict == "not established"


@pytest.mark.parametrize("freedom", [10**4, 10**6, 10**8])
def test_students_quantiles_of_long_texts_are_nearly_normal(freedom: int) -> None:
    z = 1.6448536
    assert student_quantile(0.95, freedom) == pytest.approx(z + (z**3 + z) / 4 / freedom, rel=1e-6)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 9, 16, 99])
def test_students_quantiles(freedom: int) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(non_inferiority.STUDENT[freedom], rel=3e-5)


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [("0.25", 0.25, "0.25"), ("1%", 0.355, "1%"), (" 2.5 % ", 0.8875, "2.5%"), ("0", 0.0, "0")],
)
def test_margins(text: str, value: float, words: str) -> None:
    margin = Margin.parse(text)
    assert margin.of(35.5) == pytest.approx(value) and str(margin) == words


@pytest.mark.parametrize("text", ["", "-1", "-0.5%", "nan", "inf", "x", "1%%", "1 BLEU", "%"])
def test_margins_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--margin .* must be a number of at least 0, in the metric's unit"):
        Margin.parse(text)
