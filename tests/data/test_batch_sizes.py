"""Batches that are prepared in a thread, and how many positions they may have."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import headscope as hs
from headscope.data import batching
from headscope.data.batching import (
    MOST_TOKENS,
    SHARE,
    BatchingOptions,
    BatchTrial,
    DeviceMemory,
    ahead,
    fitting_tokens,
)
from headscope.data.encoded import Batch, Side
from headscope.engine import plan
from headscope.engine.plan import batch_tokens, choose_analyses
from headscope.engine.runner import AnalysisRunner
from tests.contracts.studies import OPTIONS
from tests.oracles import checkpoints, tiny
from tests.oracles.pretended import FIRST, pretended

CPU_TOKENS = BatchingOptions().tokens


class FakeMemory(DeviceMemory):
    """A device on which every position of a batch takes so many bytes, beside some that any batch takes."""

    def __init__(self, free: int, *, each: int, fixed: int = 0, positions: Callable[[], int]) -> None:
        self.room, self.each, self.fixed, self.positions, self.asked = free, each, fixed, positions, 0

    def free(self) -> int:
        return self.room

    def peak(self, work: Callable[[], object]) -> int:
        self.asked += 1
        work()
        return self.fixed + self.each * self.positions()


def batch(rows: int, length: int) -> Batch:
    ids = torch.arange(rows * length).view(rows, length) + 1
    return Batch(torch.arange(rows), 0, Side(ids, ids > 0, ids < 0))


@pytest.mark.parametrize(
    ("free", "limit", "expected"),
    [(10_000_000, 7, 4096), (10_000_000, 14, 2048), (10**12, 7, MOST_TOKENS), (10, 7, CPU_TOKENS)],
)
def test_a_batch_is_as_large_as_memory_allows(free: int, limit: int, expected: int) -> None:
    seen: list[Batch] = []
    memory = FakeMemory(free, each=1000, fixed=300_000, positions=lambda: seen[-1].positions)
    found = fitting_tokens(BatchTrial.of(batch(3, 7), seen.append), memory, limit=limit)
    assert found == expected and memory.asked == 2
    assert [part.positions for part in seen] == [21, 21, 42]
    if CPU_TOKENS < found < MOST_TOKENS:
        assert 300_000 + 1000 * found <= SHARE * free < 300_000 + 1000 * (found + CPU_TOKENS)


def test_auto_on_a_cpu_and_on_devices() -> None:
    """A CPU and a device that cannot tell have 2,048; else the longest sentences of the text are tried."""
    its, corpus = tiny.checkpoint("bert", 7), tiny.corpus(7, count=19)
    names = ["confidence", "gradient", "ablation"]
    arguments: Any = (corpus, choose_analyses(only=names), replace(OPTIONS, objective=""))
    assert batch_tokens(its, *arguments) == (CPU_TOKENS, "")
    with pretended():
        there = its.with_model(tiny.checkpoint("bert", 7).model.to(FIRST))
        tokens, said = batch_tokens(there, *arguments)
        assert tokens == CPU_TOKENS and said.startswith("--batch-tokens auto: sim does not say")
        tried: list[int] = []
        longest = max(len(e.ids) for e in its.encode([s.source for s in corpus], side="source", limit=97))

        class Watched(AnalysisRunner):
            def run(self, batch: Batch) -> None:
                assert batch.longest == longest
                tried.append(batch.positions)
                super().run(batch)

        memory = FakeMemory(3 * 10**8, each=1000, positions=lambda: tried[-1])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plan, "AnalysisRunner", Watched)
            tokens, said = batch_tokens(there, *arguments, memory=memory)
    assert tried[1] == tried[0] and tried[2] == 2 * tried[0]
    assert said == "" and CPU_TOKENS < tokens < MOST_TOKENS


def ranked(its: Any) -> object:
    made = hs.Model(its).rank(by="gradient", text=checkpoints.SOURCES, target=checkpoints.TARGETS)
    return made.scores["score"].tolist()


def scored(its: Any) -> object:
    found = hs.Model(its).evaluate(checkpoints.SOURCES, target=checkpoints.TARGETS, metrics="perplexity", bootstrap=2)
    return found["perplexity"].value


def translated(its: Any) -> object:
    return hs.Model(its).translate(checkpoints.SOURCES, beam=2)


@pytest.mark.slow
@pytest.mark.parametrize("work", [ranked, scored, translated])
def test_every_pass_over_text_takes_what_fits(work: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is asked with a batch once and twice as large; the numbers are those of other batches."""
    its = checkpoints.small()
    memory = FakeMemory(10**9, each=1, positions=lambda: memory.asked)
    monkeypatch.setattr(batching, "memory_of", lambda device: memory if device.type != "cpu" else None)
    expected = work(its)
    assert memory.asked == 0
    with pretended():
        found = work(its.with_model(copy.deepcopy(its.model).to(FIRST)))
    assert memory.asked == 2
    assert found == (expected if work is translated else pytest.approx(expected, rel=1e-6))


def test_items_come_in_order_and_one_ahead() -> None:
    made: list[int] = []
    second = threading.Event()

    def numbers() -> Iterator[int]:
        for number in range(5):
            made.append(number)
            if number == 1:
                second.set()
            yield number

    items = ahead(numbers())
    assert next(items) == 0
    assert second.wait(timeout=60)  # it is made while nobody asks
    assert list(items) == [1, 2, 3, 4] and made == [0, 1, 2, 3, 4]
