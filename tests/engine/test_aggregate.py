"""Sums of several statistics at once are what each adds up alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headscope.bootstrap import GROUPS, GroupSums, Ratio
from headscope.data.encoded import Batch, Side
from headscope.engine.aggregate import Aggregator, Observation, Statistic
from headscope.engine.base import Analysis
from headscope.errors import NumericalError
from headscope.heads import Site
from tests.oracles.pretended import SECOND, pretended

SENTENCES, HEADS = GROUPS + 41, 3
WIDTHS = {"plain": (2 * HEADS, 1), "own counts": (2 * HEADS, 2 * HEADS), "other": (5, 1)}


class Named(Analysis):
    """An analysis that has a name."""

    name, summary = "named", "nothing"


def observed() -> dict[str, tuple[Any, Any]]:
    """Totals and counts of every sentence."""
    luck = torch.Generator().manual_seed(3)
    return {
        name: (
            torch.randn(SENTENCES, totals, generator=luck, dtype=torch.float64),
            torch.randint(1, 11, (SENTENCES, counts), generator=luck),
        )
        for name, (totals, counts) in WIDTHS.items()
    }


def statistic(name: str) -> Statistic:
    return Statistic("named", name, Site.CROSS, 4)


def batches(parts: tuple[torch.Tensor, ...]) -> list[Batch]:
    empty = Side(*(torch.zeros(1, 1, dtype=torch.long) for _ in range(3)))
    return [Batch(part, 0, empty) for part in parts]


def test_statistics_that_are_added_up_together_are_what_each_adds_up_alone() -> None:
    from headscope.engine.base import RunOptions

    aggregator, analysis, numbers = Aggregator(budget=2**29), Named(RunOptions()), observed()
    parts = torch.randperm(SENTENCES, generator=torch.Generator().manual_seed(2)).split(7)
    for batch in batches(parts):
        ratios = {name: Ratio(*(values[batch.indices] for values in both)) for name, both in numbers.items()}
        seen = [Observation(analysis, statistic(name), ratio) for name, ratio in ratios.items()]
        assert all(values.isfinite().all() for values in aggregator.add(batch, seen))
    aggregator.unstack()
    for name, (total, count) in numbers.items():
        alone = GroupSums()
        for part in parts:
            alone.add(part, Ratio(total[part], count[part]))
        sums = aggregator.sums["named"][name, Site.CROSS, 4]
        assert torch.equal(sums.total, alone.total) and sums.used == alone.used
        assert torch.equal(sums.count, alone.count)
        assert sums.total.untyped_storage().nbytes() == sums.total.nbytes


def test_sums_that_are_not_finite_are_named() -> None:
    from headscope.engine.base import RunOptions

    aggregator, analysis = Aggregator(budget=2**29), Named(RunOptions())
    total = torch.ones(2, 2 * HEADS)
    total[1, HEADS] = torch.inf
    seen = [Observation(analysis, statistic("plain"), Ratio(total, torch.ones(2, 1)))]
    list(aggregator.add(batches((torch.arange(2),))[0], seen))
    with pytest.raises(NumericalError, match=r"named.*cross\.4"):
        aggregator.refuse_non_finite()


@pytest.mark.slow
def test_a_device_without_float64_keeps_what_rounding_loses() -> None:
    """A large number, then many small ones that float32 would lose one by one."""
    numbers = torch.cat([torch.full((1, 1), 2.0**24), torch.full((2000, 1), 0.25)])
    sums = GroupSums(groups=1)
    with pretended(float64=False):
        for number in numbers:
            sums.add(torch.zeros(2, dtype=torch.long), Ratio(number.expand(2, 1).to(SECOND), torch.ones(2, 1)))
        assert sums.total.dtype is torch.float32 and sums.total.device.type != "cpu"
        sums.settle()
    assert sums.total.item() == 2 * (2.0**24 + 500) and sums.count.item() == 2 * len(numbers)
