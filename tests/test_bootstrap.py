"""Group sums and bootstrap intervals: against explicit sums, explicit resampling, and a known distribution."""

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope.bootstrap import BUDGET, FOLDS, GROUPS, Bootstrap, GroupSums, Ratio, interval
from tests.oracles import bootstrap

SHAPE = (3, 5)


def values(sentences: int, *, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sentences, *shape, generator=generator, dtype=torch.float64)


def counts(sentences: int, *, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 11, (sentences, 1, 1), generator=generator).double()


def collect(
    total: Tensor, count: Tensor, *, batch: int = 7, order: int = 2, groups: int = GROUPS, budget: int = BUDGET
) -> GroupSums:
    """Sums of sentences that come in a random order, a few at a time."""
    sums = GroupSums(groups, budget)
    sentences = torch.randperm(len(total), generator=torch.Generator().manual_seed(order))
    for part in torch.split(sentences, batch):
        sums.add(part, Ratio(total[part], count[part]))
    return sums


def ratio(sums: GroupSums, *, seed: int = 3, replicates: int = 41) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    estimate = Bootstrap(seed=seed, replicates=replicates).ratio(sums)
    return estimate.value, estimate.low, estimate.high


@pytest.mark.parametrize("sentences", [2, 13, GROUPS])
def test_up_to_1024_sentences_it_is_the_bootstrap_over_sentences(sentences: int) -> None:
    total, count = values(sentences), counts(sentences)
    sums = collect(total, count)
    assert sums.n_used == sentences
    value, low, high = ratio(sums, replicates=11)
    for cell in [(0, 0), (2, 4)]:
        terms = [(total[s][cell].item(), count[s].item()) for s in range(sentences)]
        expected = bootstrap.mean(terms, seed=3, replicates=11)
        assert (value[cell], low[cell], high[cell]) == pytest.approx(expected, abs=1e-12)


def test_many_statistics_at_once_give_what_each_gives() -> None:
    """Those of another shape or of another number of sentences, too; in the order they were given."""
    statistics = [collect(values(29, seed=seed), counts(29, seed=seed + 50)) for seed in range(5)]
    statistics.insert(2, collect(values(31, seed=8), counts(31)))
    statistics.insert(4, collect(values(29, seed=9, shape=(2, 1)), counts(29)))
    bootstrap = Bootstrap(seed=3, replicates=41)
    for together, alone in zip(bootstrap.ratios(statistics), map(bootstrap.ratio, statistics), strict=True):
        for name in ("value", "low", "high"):
            np.testing.assert_allclose(getattr(together, name), getattr(alone, name), rtol=0, atol=1e-12)


def test_more_sentences_are_put_into_groups() -> None:
    """Sentence i is in group i mod 1024; the value is that of all, the intervals resample the groups."""
    sentences = 2 * GROUPS + 17
    total, count = values(sentences), counts(sentences)
    sums = collect(total, count, batch=101)
    assert sums.n_used == GROUPS == len(sums.total)
    for group in (0, 16, 17, GROUPS - 1):
        members = [s for s in range(sentences) if s % GROUPS == group]
        assert len(members) == (3 if group < 17 else 2)
        torch.testing.assert_close(sums.total[group], total[members].sum(0), atol=1e-12, rtol=0)
        assert sums.count[group] == count[members].sum()
    value, low, high = ratio(sums, replicates=5)
    np.testing.assert_allclose(value, (total.sum(0) / count.sum(0)).numpy(), atol=1e-12)
    terms = [(sums.total[g, 1, 2].item(), sums.count[g].item()) for g in range(GROUPS)]
    expected = bootstrap.mean(terms, seed=3, replicates=5)
    assert (value[1, 2], low[1, 2], high[1, 2]) == pytest.approx(expected, abs=1e-12)


def test_halving_keeps_totals() -> None:
    total, count = values(29), counts(29)
    sums = collect(total, count, groups=32)
    for groups, n_used in ((16, 16), (8, 8), (4, 4)):
        sums.halve()
        assert (sums.groups, sums.n_used, len(sums.total), len(sums.count)) == (groups, n_used, groups, groups)
        torch.testing.assert_close(sums.total.sum(0), total.sum(0), atol=1e-12, rtol=0)
        assert sums.count.sum() == count.sum()
        expected = collect(total, count, groups=groups)
        torch.testing.assert_close(sums.total, expected.total, atol=1e-12, rtol=0)
    sums.add(torch.tensor([29]), Ratio(values(1, seed=9), counts(1)))
    torch.testing.assert_close(sums.total[29 % 4], expected.total[29 % 4] + values(1, seed=9)[0])


def test_budget_bounds_memory_from_the_start() -> None:
    total, count = values(40), counts(40)
    budget = 10 * total[0].nbytes
    sums = collect(total, count, budget=budget)
    assert sums.groups == 8 and sums.total.nbytes <= budget
    np.testing.assert_allclose(ratio(sums)[0], (total.sum(0) / count.sum(0)).numpy(), atol=1e-12)


def test_centred_axis_grows_around_its_middle() -> None:
    """Histograms of offsets -2 … 2, then -4 … 4, then -1 … 1: offset 0 stays in the middle."""
    sums = GroupSums()
    for sentence, reach in enumerate((2, 4, 1)):
        histogram = torch.arange(2 * reach + 1.0)[None, None] + 1  # [1 1 o], 1 at the left end
        sums.add(torch.tensor([sentence]), Ratio(histogram, torch.ones(1, 1, 1), centred=True))
    expected = [1, 2, 3 + 1, 4 + 2 + 1, 5 + 3 + 2, 6 + 4 + 3, 7 + 5, 8, 9]
    assert sums.total.sum(0)[0].tolist() == expected
    assert sums.total[0, 0].tolist() == [0, 0, 1, 2, 3, 4, 5, 0, 0]


def test_batches_as_a_whole_go_to_their_fold() -> None:
    sums = GroupSums(groups=FOLDS)
    for fold in (0, 3, 3):
        sums.add(torch.tensor([fold]), Ratio(torch.ones(1, 2, 2), torch.ones(1, 1, 1), per_batch=True))
    assert sums.n_used == 4 and sums.count[:, 0, 0].tolist() == [1, 0, 0, 2] + [0] * (FOLDS - 4)


def test_one_sentence_has_no_interval() -> None:
    value, low, high = ratio(collect(values(1), counts(1)))
    assert np.array_equal(value, (values(1) / counts(1))[0]) and np.isnan([low, high]).all()


def test_interval_leaves_nan_out_cell_by_cell() -> None:
    samples = torch.tensor([[5.0, 1.0], [1.0, torch.nan], [torch.nan, torch.nan], [3.0, torch.nan], [2.0, torch.nan]])
    estimate = interval(samples.double())
    assert estimate.value.tolist() == [5, 1]
    assert estimate.low[0] == pytest.approx(np.quantile([1, 2, 3], 0.025))
    assert estimate.high[0] == pytest.approx(np.quantile([1, 2, 3], 0.975))
    assert np.isnan(estimate.low[1]) and np.isnan(estimate.high[1])


@pytest.mark.parametrize("replicates", [1, 2, 10, 41, 1000])
def test_quantiles_are_those_of_numpy(replicates: int) -> None:
    samples = values(1 + replicates, shape=(2, 3))
    estimate = interval(samples)
    assert estimate.value.shape == estimate.low.shape == estimate.high.shape == (2, 3)
    np.testing.assert_allclose(estimate.low, np.quantile(samples[1:], 0.025, axis=0), atol=1e-14)
    np.testing.assert_allclose(estimate.high, np.quantile(samples[1:], 0.975, axis=0), atol=1e-14)


def test_draws_are_whole_resamples_and_the_same_each_time() -> None:
    draws = Bootstrap(seed=5, replicates=31).draws(13)
    assert draws.shape == (31, 13) and (draws.sum(1) == 13).all() and (draws >= 0).all()
    assert torch.equal(draws, Bootstrap(seed=5, replicates=31).draws(13))
    assert not torch.equal(draws, Bootstrap(seed=6, replicates=31).draws(13))
    samples = bootstrap.draw_samples(13, seed=5, replicates=31)
    assert [row.tolist() for row in draws] == [[sample.count(s) for s in range(13)] for sample in samples]


def test_every_statistic_sees_the_same_resamples() -> None:
    """So that differences of two statistics have honest intervals: x / n - y / n is (x - y) / n."""
    sampler = Bootstrap(seed=1, replicates=17)
    total, other, count = values(11), values(11, seed=5), counts(11)
    first, second = sampler.sums(collect(total, count)), sampler.sums(collect(other, count))
    difference = sampler.sums(collect(total - other, count))
    torch.testing.assert_close(first[0] / first[1] - second[0] / second[1], difference[0] / difference[1])


@pytest.mark.parametrize("heads_counted", [1, 5])
def test_parts_are_the_sums_of_some_heads_after_the_other(heads_counted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headscope.bootstrap.PART_NUMBERS", 2 * 7 * 11)  # two heads of seven cells, with ten replicates
    noise, sums, sampler = torch.Generator().manual_seed(3), GroupSums(), Bootstrap(seed=3, replicates=10)
    total = torch.randint(0, 9, (13, 5, 7), generator=noise)
    sums.add(torch.arange(13), Ratio(total, total.sum(-1, keepdim=True)[:, :heads_counted], centred=True))
    parts = list(sampler.parts(sums))
    assert [part.shape[1] for part, _ in parts] == [2, 2, 1] and max(part.numel() for part, _ in parts) <= 2 * 7 * 11
    full, counts = sampler.sums(sums)
    assert torch.equal(torch.cat([part for part, _ in parts], dim=1), full)
    assert all(torch.equal(count, counts) for _, count in parts) or torch.equal(
        torch.cat([count for _, count in parts], dim=1), counts
    )


def test_intervals_of_many_cells_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.rand(11, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    samples[3, 1, 2] = torch.nan
    full = interval(samples)
    monkeypatch.setattr("headscope.bootstrap.SORTED_NUMBERS", 20)  # two cells at a time
    for name in ("value", "low", "high"):
        assert np.array_equal(getattr(interval(samples), name), getattr(full, name))


@pytest.mark.parametrize("sentences", [97, 3 * GROUPS])
def test_intervals_cover_the_truth_as_often_as_they_say(sentences: int) -> None:
    """Sentences of 3 to 17 tokens whose mean differs from sentence to sentence; the true mean is 1.

    400 corpora at once, as cells of one statistic. Each sentence's tokens share a shift, so that tokens
    are not independent and an interval over tokens would be too short.
    """
    random, corpora = np.random.default_rng(11), 400
    lengths = random.integers(3, 18, size=(sentences, 1))
    shift = random.exponential(1.0, size=(sentences, corpora))  # skewed, mean 1
    total = lengths * shift + np.sqrt(lengths) * random.normal(size=(sentences, corpora))
    sums = collect(torch.from_numpy(total), torch.from_numpy(lengths).double(), batch=701)
    _, low, high = ratio(sums, replicates=400)
    coverage = ((low <= 1) & (high >= 1)).mean()
    assert 0.92 <= coverage <= 0.98  # 0.95 ± 0.022 (two standard errors of 400 corpora), a little less if skewed


def test_half_precision_is_added_up_in_double() -> None:
    sums = GroupSums()
    for _ in range(4096):
        sums.add(torch.tensor([0]), Ratio(torch.ones(1, 1).half(), torch.ones(1, 1).half()))
    assert sums.total.dtype == torch.float64 and sums.total[0].item() == 4096


def test_replicates_without_any_count_are_left_out() -> None:
    """Two of four sentences count alike: replicates that miss both are 0/0, all others give their mean."""
    total, count = torch.tensor([[0.0], [6.0], [0.0], [3.0]]), torch.tensor([[0.0], [4.0], [0.0], [2.0]])
    value, low, high = ratio(collect(total, count))
    assert value == low == high == 1.5
    value, low, high = ratio(collect(total[:3], count[:3]))
    assert value == 1.5 and np.isnan([low, high]).all(), "one of three: nothing says how others differ"
