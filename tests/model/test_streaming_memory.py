"""Streamed attention keeps within its budget of memory, counted in bytes of living tensors."""

import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headscope.data.encoded import Batch, Side
from headscope.engine.heads.head_batch import HeadBatch, ObservedBatch
from headscope.heads import Site
from headscope.model import streaming as stream
from headscope.model.attention import AttentionCall, ScoreOptions
from headscope.model.discovery import AttentionSite
from headscope.model.streaming import LazyMask, causal_mask, streamed_context

pytestmark = pytest.mark.slow

B, H, T, K = 2, 7, 601, 3
SMALLER = 32  # the budget of tests is so much smaller, so that short texts are far above it


class LivingBytes(TorchDispatchMode):
    """The bytes of all tensors that operations made and that are still there, and their peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.users: Counter[int] = Counter()
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._count(storage.data_ptr(), storage.nbytes(), 1)
                weakref.finalize(tensor, self._count, storage.data_ptr(), storage.nbytes(), -1)
        return made

    def _count(self, place: int, size: int, users: int) -> None:
        before = self.users[place] > 0
        self.users[place] += users
        self.now += size * (int(self.users[place] > 0) - int(before))
        self.peak = max(self.peak, self.now)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small budget, in bytes."""
    monkeypatch.setattr(stream, "AT_A_TIME", stream.BUDGET // 2 // SMALLER)
    return stream.BUDGET // SMALLER


def window(size: int) -> LazyMask:
    """A sliding window known by its function alone."""

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = torch.arange(queries.start, queries.stop)[:, None], torch.arange(keys.start, keys.stop)
        return ((columns <= rows) & (columns > rows - size)).expand(B, 1, -1, -1)

    return LazyMask(block, (B, 1, T, T), dtype=torch.float32, device=torch.device("cpu"))


def earlier(queries: slice, keys: slice) -> Tensor:
    """Every earlier key [b q n], as where a text has one word alone."""
    size = (B, queries.stop - queries.start, keys.stop - keys.start)
    return torch.ones(size, dtype=torch.bool).tril(queries.start - keys.start - 1)


def observe(block: HeadBatch) -> None:
    """What analyses ask of a block."""
    block.maximum, block.entropy  # noqa: B018
    block.weight_on_pairs("earlier", lambda keys: earlier(block.span, keys))
    block.weight_on(torch.ones(B, T, 2))
    block.visible_on(torch.ones(B, T, 2))


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_what_is_there_at_a_time_keeps_within_the_budget(mask: str, budget: int) -> None:
    module, tokens = nn.Module(), torch.ones(B, T, dtype=torch.long)
    query, key, value = (torch.randn(B, H, T, K) for _ in range(3))
    side = Side(tokens, tokens.bool(), ~tokens.bool())
    with LivingBytes() as living:
        lazy = causal_mask(T, None, device=query.device) if mask == "causal" else window(500)
        call = AttentionCall(module, query, key, value, value, ScoreOptions(mask=lazy))
        place = AttentionSite(Site.DECODER_SELF, 0, H, H, K, "")
        for block in ObservedBatch(Batch(torch.arange(B), 0, side)).heads(place, call).in_blocks():
            observe(block)
    assert 0 < living.peak <= budget < B * H * T * T * 4


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.ones(H)}], ids=str)
def test_contexts_without_a_kernel_keep_within_the_budget(options: dict[str, Any], budget: int) -> None:
    query, key, value = (torch.randn(B, H, T, K) for _ in range(3))
    mask = causal_mask(T, None, device=query.device)
    with LivingBytes() as living:
        streamed_context(query, key, value, ScoreOptions(mask=mask, scaling=1.0, **options))
    assert 0 < living.peak <= budget
