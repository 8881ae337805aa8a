"""Pieces of work on several threads: their order, torch's threads, errors."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Barrier, get_ident

import pytest
import torch
from torch import Tensor

from headscope.threads import MOST, spread


@pytest.fixture(params=[1, 2, 3 * MOST])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """So many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_results_come_in_the_order_of_the_items_and_torch_keeps_its_threads(threads: int) -> None:
    assert spread(lambda number: number * number, range(11)) == [number * number for number in range(11)]
    assert spread(lambda number: number, []) == []
    assert torch.get_num_threads() == threads


def test_workers_share_torchs_threads(threads: int) -> None:
    workers = min(threads, MOST)
    together = Barrier(workers, timeout=60)

    def seen(_: int) -> tuple[int, int]:
        together.wait()
        return get_ident(), torch.get_num_threads()

    found = spread(seen, range(workers))
    assert len({ident for ident, _ in found}) == workers
    assert {each for _, each in found} == {threads // workers}


def test_nothing_is_recorded_for_gradients(threads: int) -> None:
    weight = torch.ones(3, requires_grad=True)

    def doubled(_: int) -> Tensor:
        return weight * 2

    assert not any(each.requires_grad for each in spread(doubled, range(5)))


def test_an_error_comes_out(threads: int) -> None:
    with pytest.raises(ZeroDivisionError):
        spread(lambda number: 1 // number, [2, 1, 0, 3])
    assert torch.get_num_threads() == threads
