"""Streamed attention: weights equal those of single rows, and memory stays within its budget."""

import weakref
from collections import Counter
from collections.abc import Callable
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
from headscope.model.streaming import LazyMask, ScoreBlocks, Visibility, causal_mask, streamed_context
from tests.oracles import attention_row as oracle

B, H, G, T, K = 3, 6, 2, 13, 5
REAL = torch.arange(T) < torch.tensor([13, 7, 11])[:, None]  # [b t], padding in the middle of the batch
VARIANTS: list[dict[str, Any]] = [{}, {"softcap": 1.3}, {"sinks": True}, {"position_bias": True}, {"scaling": 0.7}]


def band_mask(window: int) -> LazyMask:
    """A causal sliding window over `REAL`, known by its function alone."""

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = torch.arange(T)[queries, None], torch.arange(T)[keys]
        return ((columns <= rows) & (columns > rows - window))[None, None] & REAL[:, None, None, keys]

    return LazyMask(block, (B, 1, T, T), dtype=torch.float64, device=torch.device("cpu"))


def gap_mask() -> Tensor:
    """A mask whose visible keys do not lie side by side."""
    visible = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(5)) < 0.5
    return visible | torch.eye(T, dtype=torch.bool)


def additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "causal": lambda: causal_mask(T, REAL, device=torch.device("cpu")),
    "window": lambda: band_mask(4),
    "padding": lambda: REAL[:, None, None, :],
    "gaps": gap_mask,
    "additive": lambda: additive_mask(gap_mask(), torch.float64),
}


def make_tensors(variant: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    noise = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    query, key, options = 2 * random(B, H, T, K), random(B, G, T, K), dict(variant)
    if "sinks" in options:
        options["sinks"] = random(H)
    if "position_bias" in options:
        options["position_bias"] = random(1, H, T, T)
    return query, key, options


def weights_of(scores: ScoreBlocks) -> Tensor:
    """The weights [b h t s] of all blocks."""
    b, h, t, _ = scores.query.shape
    all_weights = torch.zeros(b, h, t, scores.key.shape[2], dtype=scores.query.dtype)
    for queries in scores.blocks(1):
        weights, keys = scores.weights(queries)
        all_weights[:, :, queries, keys] = weights
    return all_weights


@pytest.mark.parametrize("size", [1, 4, T])
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_weights_equal_those_of_single_rows(
    name: str, variant: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1)
    monkeypatch.setattr(stream, "MIN_QUERIES", size)
    query, key, options = make_tensors(variant)
    weights = weights_of(ScoreBlocks.of(query, key, Visibility.of(MASKS[name](), (B, T, T)), ScoreOptions(**options)))
    visible = Visibility.of(MASKS[name](), (B, T, T)).visible(slice(0, T), slice(0, T))[:, 0].expand(B, T, T)
    for b, h, t in [(0, 5, 12), (0, 2, 3), (1, 0, 5), (1, 4, 1), (2, 3, 9)]:
        bias = options.get("position_bias")
        expected = oracle.row(
            query[b, h, t].numpy(),
            key[b, h * G // H].numpy(),
            visible[b, t].numpy(),
            scaling=options.get("scaling", K**-0.5),
            softcap=options.get("softcap"),
            bias=None if bias is None else bias[0, h, t].numpy(),
            sink=options["sinks"][h].item() if "sinks" in options else None,
        )
        assert weights[b, h, t].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_lazy_mask_is_the_whole_one_in_any_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "BLOCK_BYTES", 1)
    mask: Any = MASKS[name]()
    rows, columns = torch.arange(T)[:, None], torch.arange(T)
    visible = (columns <= rows) & (columns > rows - (T if name == "causal" else 4)) & REAL[:, None, None]
    expected = additive_mask(visible, mask.dtype)
    assert mask.shape == (B, 1, T, T) and type(mask + 0.0) is Tensor
    assert torch.equal(mask + 0.0, expected.to(mask.dtype)) and torch.equal(
        mask[:, :, 2:5], expected[:, :, 2:5].to(mask.dtype)
    )
    assert mask.spans is not None
    positions = torch.arange(T)
    inside = (positions >= mask.spans.first[..., None]) & (positions < mask.spans.end[..., None])
    assert torch.equal(inside[:, None], visible.expand(B, 1, T, T))


BATCH, HEADS, LENGTH, WIDTH = 2, 7, 601, 3
SMALLER = 32  # the budget of tests is so much smaller, so that short texts are far above it


class LiveBytes(TorchDispatchMode):
    """Bytes of all live tensors that operations returned, now and at the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.users: Counter[int] = Counter()
        self.current = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._count(storage.data_ptr(), storage.nbytes(), 1)
                weakref.finalize(tensor, self._count, storage.data_ptr(), storage.nbytes(), -1)
        return result

    def _count(self, address: int, size: int, users: int) -> None:
        before = self.users[address] > 0
        self.users[address] += users
        self.current += size * (int(self.users[address] > 0) - int(before))
        self.peak = max(self.peak, self.current)


@pytest.fixture
def budget(monkeypatch: pytest.MonkeyPatch) -> int:
    """A small budget, in bytes."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", stream.BUDGET // 2 // SMALLER)
    return stream.BUDGET // SMALLER


def window_mask(size: int) -> LazyMask:
    """A sliding window known by its function alone."""

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = torch.arange(queries.start, queries.stop)[:, None], torch.arange(keys.start, keys.stop)
        return ((columns <= rows) & (columns > rows - size)).expand(BATCH, 1, -1, -1)

    return LazyMask(block, (BATCH, 1, LENGTH, LENGTH), dtype=torch.float32, device=torch.device("cpu"))


def earlier_keys(queries: slice, keys: slice) -> Tensor:
    """Every earlier key [b q n], as where a text has one word alone."""
    size = (BATCH, queries.stop - queries.start, keys.stop - keys.start)
    return torch.ones(size, dtype=torch.bool).tril(queries.start - keys.start - 1)


def observe(block: HeadBatch) -> None:
    """Read what analyses read of a block."""
    block.maximum, block.entropy  # noqa: B018
    block.weight_on_pairs("earlier", lambda keys: earlier_keys(block.span, keys))
    block.weight_on(torch.ones(BATCH, LENGTH, 2))
    block.visible_on(torch.ones(BATCH, LENGTH, 2))


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_what_is_there_at_a_time_keeps_within_the_budget(mask: str, budget: int) -> None:
    module, tokens = nn.Module(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    query, key, value = (torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3))
    side = Side(tokens, tokens.bool(), ~tokens.bool())
    with LiveBytes() as live_bytes:
        lazy_mask = causal_mask(LENGTH, None, device=query.device) if mask == "causal" else window_mask(500)
        call = AttentionCall(module, query, key, value, value, ScoreOptions(mask=lazy_mask))
        site = AttentionSite(Site.DECODER_SELF, 0, HEADS, HEADS, WIDTH, "")
        for block in ObservedBatch(Batch(torch.arange(BATCH), 0, side)).heads(site, call).in_blocks():
            observe(block)
    assert 0 < live_bytes.peak <= budget < BATCH * HEADS * LENGTH * LENGTH * 4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": torch.ones(HEADS)}], ids=str)
def test_contexts_without_a_kernel_keep_within_the_budget(options: dict[str, Any], budget: int) -> None:
    query, key, value = (torch.randn(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3))
    mask = causal_mask(LENGTH, None, device=query.device)
    with LiveBytes() as live_bytes:
        streamed_context(query, key, value, ScoreOptions(mask=mask, scaling=1.0, **options))
    assert 0 < live_bytes.peak <= budget
