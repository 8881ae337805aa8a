"""Verdicts of non-inferiority: limits and power against brute force, margins, and what too little text can say."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF
from scipy.special import betaincinv, stdtrit

from headscope.evaluation.before_after import judge_loss
from headscope.evaluation.margin import Margin
from headscope.evaluation.metrics.base import METRICS, Translations
from headscope.evaluation.non_inferiority import (
    NonInferiority,
    dirichlet_mean_quantile,
    in_fixed_sequence,
    judge,
    take_established,
)
from tests.oracles import non_inferiority

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def leave_one_out(losses: Array) -> Array:
    """The mean of losses [... n] and their leave-one-out means, together [... 1 + n]."""
    total, n = losses.sum(axis=-1, keepdims=True), losses.shape[-1]
    return np.concatenate([total / n, (total - losses) / (n - 1)], axis=-1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["perplexity", "accuracy"])
@pytest.mark.parametrize(("sentences", "harm"), [(2, 0.5), (4, 0.02), (13, 0.0), (13, 0.5), (31, 0.02)])
def test_verdicts_equal_brute_force(name: str, sentences: int, harm: float) -> None:
    rng = np.random.default_rng(sentences)
    counts = rng.integers(2, 9, size=sentences).astype(float)
    intact = np.stack([rng.uniform(0.2, 0.9, sentences) * counts, counts], axis=1)
    better, metric = METRICS.get(name).higher_is_better, METRICS.get(name)
    pairs = []
    for _ in range(2):
        pruned = intact.copy()
        pruned[:, 0] += (-1 if better else 1) * harm * rng.uniform(-0.5, 1.5, sentences)
        pairs.append((intact, pruned))
    result = judge_loss(metric, [pruned for _, pruned in pairs], intact, Margin(0.03))

    def value(sums: list[list[float]]) -> float:
        ratio = sum(total for total, _ in sums) / sum(count for _, count in sums)
        return ratio if better else math.exp(ratio)

    lists = [(intact.tolist(), pruned.tolist()) for intact, pruned in pairs]
    lose_line = (lambda line: [0.0, line[1]]) if better else None
    expected = non_inferiority.judge(value, lists, margin=0.03, ruin=lose_line, higher_is_better=better)
    assert result.verdict == expected.pop("verdict")
    for column, number in expected.items():
        near = pytest.approx(number, rel=3e-5, abs=1e-9)  # the table of Student has so many digits
        assert getattr(result, column) == near, column
    if harm == 0:
        assert result.verdict == "not established" and result.worse == 0


@pytest.mark.slow
def test_the_verdict_is_where_the_limits_are() -> None:
    losses = np.random.default_rng(1).normal(0.2, 0.1 * math.sqrt(1000), 1000)
    worse = leave_one_out(losses - losses.mean() + 0.2)
    limits = {"non-inferior": 0.4, "not established": 0.25, "worse": 0.02}
    for verdict, margin in limits.items():
        result = judge(worse, margin=margin, largest=1.0)
        assert result.verdict == verdict and result.worse == pytest.approx(0.2) and result.margin == margin
        assert result.worse_limit == pytest.approx(0.2 + 1.7 * 0.1, abs=0.01)
        assert result.detectable == pytest.approx((1.7 + 0.842) * 0.1, rel=0.05)
    assert judge(worse - 9, margin=0.0, largest=1.0).verdict == "non-inferior"
    assert judge(worse, margin=0.4, largest=1.0, level=0.999).verdict == "not established"


@pytest.mark.parametrize("losses", [[-1.0, 0, 0, 0, 0], [-3.0, 0, 0, 0, 0, 0, 0, 0, 0, 0]])
def test_where_one_gain_stands_out_the_limit_is_students(losses: list[float]) -> None:
    """Student's limit exceeds Gaffke's where nothing can be lost; quantiles (n − 1 degrees of freedom) are scipy's."""
    quantile = {5: 2.13184679, 10: 1.83311293}[len(losses)]
    error = -losses[0] / len(losses)  # (deviation) |x| / √n, over √n
    result = judge(leave_one_out(np.array(losses)), margin=1.0, largest=0.0)
    assert result.worse_limit == pytest.approx(result.worse + quantile * error, rel=1e-6)
    assert result.detectable == pytest.approx((quantile + 0.84162123) * error, rel=1e-6)


@pytest.mark.parametrize(("sentences", "is_established"), [(2, False), (4, False), (290, False), (310, True)])
def test_where_nothing_differs_the_rule_of_three_says_how_many_sentences_are_enough(
    sentences: int, is_established: bool
) -> None:
    result = judge(np.zeros(1 + sentences), margin=0.35, largest=35.0)
    assert (result.verdict == "non-inferior") is is_established
    assert result.worse == 0 and result.detectable == result.worse_limit
    assert (1 - result.detectable / 35) ** sentences == pytest.approx(0.05)  # as likely is a text that misses them all
    assert result.detectable <= 35 * 3 / sentences


@pytest.mark.parametrize(("loss", "sentences", "limit"), [(0, 60, 0.048703), (1, 100, 0.046560), (30, 1000, 0.040472)])
def test_of_losses_that_are_0_or_1_the_limit_is_that_of_clopper_and_pearson(
    loss: int, sentences: int, limit: float
) -> None:
    """Quantiles of Beta(lost + 1, sentences − lost) as scipy 1.17 has them."""
    values = np.r_[np.ones(loss + 1), np.zeros(sentences - loss)]
    assert dirichlet_mean_quantile(values, 0.95) == pytest.approx(limit, abs=1e-6)


@pytest.mark.parametrize("accuracy", [0.98, 0.45, 0.1])
@pytest.mark.parametrize(("n_lost", "lines"), [(0, 300), (1, 300), (9, 600), (30, 1000)])
def test_a_line_can_be_lost_wholly_by_a_model_of_whatever_accuracy(accuracy: float, n_lost: int, lines: int) -> None:
    """The larger of Clopper & Pearson's limit on the share of lost lines and Student's limit."""
    right, metric = np.arange(lines) < round(accuracy * lines), METRICS.get("accuracy")
    after = right & (np.arange(lines) >= n_lost)
    sums, pruned = (np.stack([hits, np.ones(lines)], axis=1).astype(float) for hits in (right, after))
    result = judge_loss(metric, [pruned], sums, Margin(0.01 * accuracy))
    student = n_lost / lines + stdtrit(lines - 1, 0.95) * (right & ~after).std(ddof=1) / math.sqrt(lines)
    assert result.worse_limit == pytest.approx(max(betaincinv(n_lost + 1, lines - n_lost, 0.95), student), rel=1e-6)
    assert (result.verdict == "non-inferior") is (result.worse_limit <= result.margin)


def test_the_most_that_a_line_can_lose() -> None:
    """Three weighted lines, by hand; BLEU and chrF by sacreBLEU's score without the matches of a line."""
    rows = np.array([[0.5, 1.0], [1.5, 2.0], [2.7, 3.0]])
    largest = {name: METRICS.get(name).largest_loss(rows) for name in ("accuracy", "cosine", "token-l2", "loss")}
    assert largest == pytest.approx(
        {"accuracy": 3 * 2.7 / 6, "cosine": 3 * 5.7 / 6, "token-l2": 3 * 3.3 / 6, "loss": 1}
    )
    assert METRICS.get("perplexity").largest_loss(rows) == pytest.approx(math.exp(4.7 / 6))
    labels = np.array([[1, 1, 1, 0, 0, 0]] * 3 + [[0, 0, 0, 1, 1, 1]]).astype(float)  # right, predicted, wanted
    assert METRICS.get("macro-f1").largest_loss(labels) == pytest.approx(4 * (1 - 1 / 2))  # the label of one line alone
    line, other = "the cat sat on the mat today", "a dog ran"
    for name, score in {"bleu": BLEU(force=True), "chrf": CHRF()}.items():
        metric = METRICS.get(name)
        sums = metric.sums(Translations([line, other], [line, other]))[:, 0]
        mismatch = "# " * 6 + "#" if name == "bleu" else "#" * 22  # as long, nothing in common
        expected = 2 * (100 - score.corpus_score([mismatch, other], [[line, other]]).score)
        assert metric.largest_loss(sums) == pytest.approx(expected)


def test_a_fixed_sequence_ends_at_the_first_size_that_fails() -> None:
    names = "non-inferior", "not established", "worse"
    good, unclear, bad = (NonInferiority(0.0, 0.1, 0.2, 0.1, name) for name in names)
    calls = []

    def yield_verdicts() -> Iterator[NonInferiority]:
        for verdict in (good, good, unclear, good):
            calls.append(verdict)
            yield verdict

    assert list(take_established(yield_verdicts())) == [good, good] and len(calls) == 3
    verdicts = [entry.verdict for entry in in_fixed_sequence([good, unclear, good, bad])]
    assert verdicts == ["non-inferior", "not established", "not tested", "worse"]
    assert in_fixed_sequence([good, good]) == [good, good] and in_fixed_sequence([]) == []


@pytest.mark.parametrize(
    ("text", "value", "words"),
    [("0.25", 0.25, "0.25"), ("1%", 0.355, "1 %"), (" 2.5 % ", 0.8875, "2.5 %"), ("0", 0.0, "0")],
)
def test_margins(text: str, value: float, words: str) -> None:
    margin = Margin.parse(text)
    assert margin.of(35.5) == pytest.approx(value) and str(margin) == words


@pytest.mark.parametrize("sentences", [8, 20, 59])
def test_few_sentences_establish_nothing_but_a_large_loss(sentences: int) -> None:
    result = judge(np.zeros(1 + sentences), margin=50.0, largest=1.0)
    assert result.verdict == "not established" and result.worse_limit < result.margin
    assert judge(np.full(1 + sentences, 60.0), margin=50.0, largest=1.0).verdict == "worse"
