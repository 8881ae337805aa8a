"""Patterns of pairs of a text: what they say of blocks of queries, and the pairs that the CPU lists."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headscope.engine.heads import earlier_keys
from headscope.engine.heads.earlier_keys import PAIR, EarlierKeys
from headscope.model.streaming.visibility import Spans

CPU = torch.device("cpu")


@st.composite
def patterns(draw: st.DrawFn) -> tuple[EarlierKeys, Spans]:
    """Marks of few kinds, some keys without one, and spans of every kind."""
    b, t = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    noise = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    queries, keys = torch.randint(3, (b, t), generator=noise), torch.randint(-1, 3, (b, t), generator=noise)
    bounds = torch.randint(t + 1, (2, b, t), generator=noise)
    return EarlierKeys(queries, keys, CPU), Spans.between(bounds[0], bounds[1])


@given(patterns())
def test_the_pairs_are_those_that_match(made: tuple[EarlierKeys, Spans]) -> None:
    pattern, spans = made
    b, t = pattern.queries.shape
    expected = [
        (q * b + row, k)
        for q in range(t)
        for row in range(b)
        for k in range(q)
        if pattern.keys[row, k] == pattern.queries[row, q] and spans.first[row, q] <= k < spans.end[row, q]
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(earlier_keys, "AT_A_TIME", 3 * earlier_keys.LISTED)
        found = pattern.listed(spans, len(expected) * PAIR)
    assert found is not None
    pairs, begins = found
    assert list(map(tuple, pairs.T.tolist())) == expected
    assert [sum(place < q * b for place, _ in expected) for q in range(t + 1)] == begins.tolist()
    if expected:
        assert pattern.listed(spans, len(expected) * PAIR - 1) is None


@given(patterns(), st.integers(0, 8), st.integers(0, 8))
def test_a_block_is_a_part_of_the_whole(made: tuple[EarlierKeys, Spans], one: int, other: int) -> None:
    pattern, _ = made
    (_, t), (start, stop) = pattern.queries.shape, sorted((one, other))
    whole = (pattern.queries[:, :, None] == pattern.keys[:, None]) & (torch.arange(t) < torch.arange(t)[:, None])
    assert torch.equal(pattern(slice(start, stop)), whole[:, start:stop])
