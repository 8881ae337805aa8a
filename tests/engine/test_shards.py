"""Several processes equal one: each has a share of the batches, the first merges the sums."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from headscope.bootstrap import GROUPS, GroupSums, Ratio
from headscope.data.batching import BatchingOptions
from headscope.data.encoded import Batch, Side
from headscope.distributed import Processes
from headscope.engine.aggregate import Aggregator, Key
from headscope.engine.base import Analysis
from headscope.engine.plan import analyze, choose_analyses
from headscope.engine.runner import AnalysisRunner
from headscope.errors import NumericalError
from headscope.heads import Site
from headscope.results.study import Study
from tests.makers.studies import run_options
from tests.oracles import tiny
from tests.oracles.shuffled import in_folds
from tests.oracles.simulation import SECOND, simulate_devices

REPLICATES = 20


@dataclass(frozen=True)
class Share(Processes):
    """One of several processes, run one after another; the first, run last, gets the messages of the others."""

    messages: list[Any] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        if self.main:
            return [value, *self.messages]
        self.messages.append(value)
        return [value]


def run_study(kind: str, processes: Processes, names: list[str]) -> Study:
    return analyze(
        tiny.checkpoint(kind, 1),
        in_folds(tiny.corpus(2, count=11, target=kind == "t5"), 3),
        analyses=choose_analyses(also=names),
        options=run_options(ranks=torch.arange(1, 54), ig_steps=3, shapley_samples=1, detail=True),
        batching=BatchingOptions(tokens=64),
        replicates=REPLICATES,
        processes=processes,
    )


def test_what_one_process_leaves_out_none_concludes() -> None:
    classes = choose_analyses(only=["entropy", "distance"])
    first, other = (AnalysisRunner(tiny.checkpoint("bert", 1), [cls(run_options()) for cls in classes]) for _ in "12")
    failing, working = other.running
    other.leave_out(failing, "its layers are strange")
    first.merge(other.part())
    assert [analysis.name for analysis in first.running] == [working.name]
    assert [(entry.analysis, entry.why) for entry in first.refusals] == [(failing.name, "its layers are strange")]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names", "world"), [("bert", ["importance", "similarity.js"], 3), ("t5", ["lrp"], 2)])
def test_shares_together_are_the_whole(kind: str, names: list[str], world: int) -> None:
    messages: list[Any] = []
    for rank in reversed(range(world)):
        merged = run_study(kind, Share(rank, world, messages), names)
    single = run_study(kind, Processes(), names)
    assert len(messages) == world - 1 and all(0 < part["states"]["runner"]["counts"][""] < 11 for part, _ in messages)
    assert (merged.sentences, merged.complete, merged.labels) == (11, True, single.labels)
    assert merged.left_out == single.left_out and merged.record["signatures"] == single.record["signatures"]
    assert merged.remarks == single.remarks
    pd.testing.assert_frame_equal(merged.heads, single.heads, rtol=1e-9, atol=1e-12)
    assert merged.tables.keys() == single.tables.keys()
    for name, table in single.tables.items():
        pd.testing.assert_frame_equal(merged.tables[name], table, rtol=1e-9, atol=1e-12)
    assert merged.arrays.keys() == single.arrays.keys()
    for name, array in single.arrays.items():
        np.testing.assert_allclose(merged.arrays[name], array, rtol=1e-9, atol=1e-12)
    assert {name: arrays.keys() for name, arrays in merged.detail.items()} == {
        name: arrays.keys() for name, arrays in single.detail.items()
    }
    for name, sentences in single.detail.items():
        for key, array in sentences.items():
            np.testing.assert_allclose(merged.detail[name][key], array, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [2**20, 4000])
def test_merged_sums_are_those_of_all_sentences(budget: int) -> None:
    """Also if one side had to merge groups, or had longer sentences than the other."""
    rng = torch.Generator().manual_seed(7)
    all_sums, *parts = (GroupSums(groups=64, budget=budget) for _ in range(3))
    for number in range(9):
        indices = torch.arange(11) + 11 * number
        total = torch.randint(5, (11, 2, 2 * (3 + number) - 1), generator=rng).float()
        ratio = Ratio(total, torch.ones(11, 1, 1), centred=True)
        for sums in (all_sums, parts[number % 2]):
            sums.add(indices, ratio)
    parts[0].merge(parts[1])
    while parts[0].groups > all_sums.groups:
        parts[0].halve()
    assert (parts[0].groups, parts[0].n_used) == (all_sums.groups, all_sums.n_used)
    assert parts[0].groups == 64 or budget == 4000
    torch.testing.assert_close(parts[0].total, all_sums.total, rtol=0, atol=0)
    torch.testing.assert_close(parts[0].count, all_sums.count, rtol=0, atol=0)


# Sums of several statistics at once are what each adds up alone.


SENTENCES, HEADS = GROUPS + 41, 3


def batches(parts: tuple[torch.Tensor, ...]) -> list[Batch]:
    ids, real, special = torch.zeros(3, 1, 1, dtype=torch.long)
    empty = Side(ids, real, special)
    return [Batch(part, 0, empty) for part in parts]


@pytest.mark.slow
def test_a_device_without_float64_keeps_what_rounding_loses() -> None:
    """A large number, then many small ones that float32 would lose one by one."""
    numbers = torch.cat([torch.full((1, 1), 2.0**24), torch.full((2000, 1), 0.25)])
    sums = GroupSums(groups=1)
    with simulate_devices(float64=False):
        for number in numbers:
            sums.add(torch.zeros(2, dtype=torch.long), Ratio(number.expand(2, 1).to(SECOND), torch.ones(2, 1)))
        assert sums.total.dtype is torch.float64 and sums.total.device.type == "cpu"
        sums.to_cpu()
    assert sums.total.item() == 2 * (2.0**24 + 500) and sums.count.item() == 2 * len(numbers)


def test_statistics_that_are_added_up_together_are_what_each_adds_up_alone() -> None:

    aggregator, numbers = Aggregator(budget=2**29), draw_statistics()
    parts = torch.randperm(SENTENCES, generator=torch.Generator().manual_seed(2)).split(7)
    for batch in batches(parts):
        ratios = {name: Ratio(*(values[batch.indices] for values in pair)) for name, pair in numbers.items()}
        observations = {("named", key(name)): ratio for name, ratio in ratios.items()}
        assert all(values.isfinite().all() for values in aggregator.add(batch, observations))
    aggregator.unstack()
    for name, (total, count) in numbers.items():
        alone = GroupSums()
        for part in parts:
            alone.add(part, Ratio(total[part], count[part]))
        sums = aggregator.sums["named"][name, Site.CROSS, 4]
        assert torch.equal(sums.total, alone.total) and sums.n_used == alone.n_used
        assert torch.equal(sums.count, alone.count)
        assert sums.total.untyped_storage().nbytes() == sums.total.nbytes


def test_sums_that_are_not_finite_are_named() -> None:

    aggregator = Aggregator(budget=2**29)
    total = torch.ones(2, 2 * HEADS)
    total[1, HEADS] = torch.inf
    observations = {("named", key("plain")): Ratio(total, torch.ones(2, 1))}
    list(aggregator.add(batches((torch.arange(2),))[0], observations))
    with pytest.raises(NumericalError, match=r"named.*cross\.4"):
        aggregator.refuse_non_finite()


class Named(Analysis):
    """An analysis that has a name."""

    name, summary = "named", "nothing"


def draw_statistics() -> dict[str, tuple[Any, Any]]:
    """Totals and counts of every sentence."""
    rng = torch.Generator().manual_seed(3)
    return {
        name: (
            torch.randn(SENTENCES, totals, generator=rng, dtype=torch.float64),
            torch.randint(1, 11, (SENTENCES, counts), generator=rng),
        )
        for name, (totals, counts) in WIDTHS.items()
    }


def key(name: str) -> Key:
    return name, Site.CROSS, 4


WIDTHS = {"plain": (2 * HEADS, 1), "own counts": (2 * HEADS, 2 * HEADS), "other": (5, 1)}
