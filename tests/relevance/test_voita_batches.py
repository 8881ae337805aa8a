"""Voita's rule for whole batches: groups of like length give what the batch gives in one piece."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.data.encoded import IGNORED, Batch, Encoded, pad_rows, pad_side
from headscope.formats.base import Checkpoint
from headscope.relevance.rulesets import RULE_SETS, Relevance, Target
from headscope.relevance.voita import explain as groups_module
from headscope.relevance.voita.explain import recorded_voita
from tests.oracles import checkpoints, native

SOURCES, TARGETS = (5, 17, 3, 11, 2, 13), (7, 11, 3, 19, 2, 5)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return checkpoints.small()


@pytest.fixture(scope="module")
def batch() -> Batch:
    """Sentences of all lengths in no order, with the longest source and the longest target in different ones."""
    noise = torch.Generator().manual_seed(3)

    def drawn(lengths: tuple[int, ...]) -> list[list[int]]:
        return [torch.randint(4, native.TARGET, (length,), generator=noise).tolist() for length in lengths]

    sources, targets = ([Encoded(ids, [False] * len(ids)) for ids in drawn(lengths)] for lengths in (SOURCES, TARGETS))
    labels = pad_rows(drawn(TARGETS), IGNORED)
    labels[3, 7] = IGNORED
    return Batch(torch.arange(6), 0, pad_side(sources), pad_side(targets), labels=labels)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "threads", "target"),
    [
        *(("voita", 1, "top1"), ("voita", 2, "reference"), ("voita-constant", 1, "reference")),
        *(("voita-eps", 1, "top1"), ("voita-paper", 1, "top1")),
    ],
)
def test_groups_give_what_the_whole_batch_gives(
    checkpoint: Checkpoint, batch: Batch, name: str, threads: int, target: Target, request: pytest.FixtureRequest
) -> None:
    rule_set: Any = RULE_SETS.get(name)
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    expected = recorded_voita(checkpoint, batch, settings=rule_set.settings, target=target).explained(neurons=False)
    found = rule_set.explain(checkpoint, batch, target=target, steps="each")
    assert torch.equal(found.counts, expected.explained.float()) and torch.equal(found.values, found.counts)
    assert found.relevance.keys() == expected.heads.keys()
    for place, heads in expected.heads.items():
        for each in fields(Relevance):
            close(getattr(found.relevance[place], each.name), getattr(heads, each.name))


def close(found: Tensor | None, expected: Tensor | None) -> None:
    assert (found is None) is (expected is None)
    if found is not None and expected is not None:
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= 1e-9 * max(1.0, float(expected.abs().max()))


def test_short_sentences_are_not_explained_at_the_length_of_long_ones(
    checkpoint: Checkpoint, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding that the passes go through, in positions of both sides: a third of the batch's."""
    seen: list[Batch] = []

    def watched(own: Checkpoint, part: Batch, **more: Any) -> Any:
        seen.append(part)
        return recorded_voita(own, part, **more)

    monkeypatch.setattr(groups_module, "recorded_voita", watched)
    RULE_SETS.get("voita").explain(checkpoint, batch, target="top1", steps="each")

    def padding(part: Batch) -> int:
        assert part.target is not None
        return int((~part.source.real).sum() + (~part.target.real).sum())

    assert sum(len(part.indices) for part in seen) == 6
    assert sum(map(padding, seen)) < padding(batch) / 3
