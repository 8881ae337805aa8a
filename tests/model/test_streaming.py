"""Statistics of rows against a slow re-derivation, whatever the size of blocks; lazy masks; what must hold exactly."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.model.streaming import statistics, visibility
from headscope.model.streaming.statistics import RowStatistics, ScoreBlocks, row_statistics
from headscope.model.streaming.visibility import LazyMask, Visibility, causal_mask
from tests.oracles import row_statistics as oracle

B, H, G, T, K = 3, 6, 2, 13, 5
REAL = torch.arange(T) < torch.tensor([13, 7, 11])[:, None]  # [b t], padding in the middle of the batch
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 1.3},
    "sinks": {"sinks": True},
    "bias": {"position_bias": True},
    "scaling": {"scaling": 0.7},
}


def band(window: int) -> LazyMask:
    """A causal sliding window over `REAL`, known by its function alone."""

    def block(queries: slice, keys: slice) -> Tensor:
        rows, columns = torch.arange(T)[queries, None], torch.arange(T)[keys]
        return ((columns <= rows) & (columns > rows - window))[None, None] & REAL[:, None, None, keys]

    return LazyMask(block, (B, 1, T, T), dtype=torch.float64, device=torch.device("cpu"))


def gaps() -> Tensor:
    """A mask whose visible keys do not lie side by side."""
    visible = torch.rand(B, 1, T, T, generator=torch.Generator().manual_seed(5)) < 0.5
    return visible | torch.eye(T, dtype=torch.bool)


def additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


MASKS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "causal": lambda: causal_mask(T, REAL, device=torch.device("cpu")),
    "window": lambda: band(4),
    "padding": lambda: REAL[:, None, None, :],
    "gaps": gaps,
    "additive": lambda: additive(gaps(), torch.float64),
}


def tensors(variant: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    noise = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    query, key, options = 2 * random(B, H, T, K), random(B, G, T, K), dict(variant)
    if "sinks" in options:
        options["sinks"] = random(H)
    if "position_bias" in options:
        options["position_bias"] = random(1, H, T, T)
    return query, key, options


def statistics_of(mask: Tensor | None, variant: dict[str, Any], counted: Tensor) -> RowStatistics:
    query, key, options = tensors(variant)
    scores = ScoreBlocks.of(query, key, Visibility.of(mask, (B, T, T)), **options)
    return row_statistics(scores, counted, tie=1e-12)


@pytest.mark.parametrize("size", [(1, 1), (4, 3), (T, T)], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MASKS)
def test_statistics_equal_those_of_single_rows(
    name: str, variant: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "CELLS", 1)
    monkeypatch.setattr(statistics, "LEAST", size[0])
    monkeypatch.setattr(statistics, "COLUMNS", size[1])
    counted = torch.ones(B, T, dtype=torch.bool)
    counted[:, 0] = False  # the first is special
    query, key, options = tensors(VARIANTS[variant])
    found = statistics_of(MASKS[name](), VARIANTS[variant], counted)
    visible = Visibility.of(MASKS[name](), (B, T, T)).visible(slice(0, T), slice(0, T))[:, 0].expand(B, T, T)
    for b, h, t in [(0, 5, 12), (0, 2, 3), (1, 0, 5), (1, 4, 1), (2, 3, 9)]:
        bias = options.get("position_bias")
        expected = oracle.row(
            query[b, h, t].numpy(),
            key[b, h * G // H].numpy(),
            visible[b, t].numpy(),
            counted[b].numpy(),
            scaling=options.get("scaling", K**-0.5),
            softcap=options.get("softcap"),
            bias=None if bias is None else bias[0, h, t].numpy(),
            sink=options["sinks"][h].item() if "sinks" in options else None,
        )
        assert [getattr(found, part)[b, h, t].item() for part in ("log_sum", "entropy", "max_weight")] == pytest.approx(
            expected[:3], abs=1e-12
        )
        assert found.argmax_position[b, h, t] == expected.argmax


def test_rows_without_scores_have_the_entropy_of_what_they_see() -> None:
    scores = ScoreBlocks.of(torch.zeros(1, 1, T, K), torch.randn(1, 1, T, K), Visibility.of(causal_one(), (1, T, T)))
    found = row_statistics(scores, torch.ones(1, T, dtype=torch.bool), tie=2.5e-7)
    assert found.entropy[0, 0].tolist() == pytest.approx([math.log(t + 1) for t in range(T)], abs=1e-6)
    assert found.entropy[0, 0, 0] == 0
    assert (found.argmax_position == 0).all(), "the first of those that tie"


def test_rows_that_see_nothing_are_zero() -> None:
    real = torch.zeros(1, T, dtype=torch.bool)
    scores = ScoreBlocks.of(
        torch.randn(1, 2, T, K), torch.randn(1, 1, T, K), Visibility.of(real[:, None, None], (1, T, T))
    )
    found = row_statistics(scores, ~real, tie=2.5e-7)
    assert all(not values.any() for values in vars(found).values())


def causal_one() -> LazyMask:
    return causal_mask(T, None, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_lazy_mask_is_the_whole_one_in_any_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visibility, "AT_A_TIME", 1)
    mask: Any = MASKS[name]()
    rows, columns = torch.arange(T)[:, None], torch.arange(T)
    visible = (columns <= rows) & (columns > rows - (T if name == "causal" else 4)) & REAL[:, None, None]
    whole = additive(visible, mask.dtype)
    assert mask.shape == (B, 1, T, T) and type(mask + 0.0) is Tensor
    assert torch.equal(mask + 0.0, whole.to(mask.dtype)) and torch.equal(
        mask[:, :, 2:5], whole[:, :, 2:5].to(mask.dtype)
    )
    assert mask.spans is not None
    places = torch.arange(T)
    inside = (places >= mask.spans.first[..., None]) & (places < mask.spans.end[..., None])
    assert torch.equal(inside[:, None], visible.expand(B, 1, T, T))


@pytest.mark.parametrize("name", MASKS)
def test_sums_over_what_is_seen(name: str) -> None:
    columns = torch.rand(B, T, 2, dtype=torch.float64)
    visibility = Visibility.of(MASKS[name](), (B, T, T))
    seen = visibility.without_padding(REAL)
    visible = visibility.visible(slice(0, T), slice(0, T))[:, 0].expand(B, T, T) & REAL[:, None]
    torch.testing.assert_close(seen.seen(columns), visible.double() @ columns)
    assert torch.equal(seen.visible(slice(2, 9), slice(1, T))[:, 0].expand(B, 7, T - 1), visible[:, 2:9, 1:])
