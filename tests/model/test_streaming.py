"""Weights of rows against a slow re-derivation, whatever the size of blocks; lazy masks; what must hold exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.model import streaming as stream
from headscope.model.attention import ScoreOptions
from headscope.model.streaming import LazyMask, ScoreBlocks, Visibility, causal_mask
from tests.oracles import attention_row as oracle

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


def weights_of(scores: ScoreBlocks) -> Tensor:
    """The weights [b h t s] of all blocks."""
    b, h, t, _ = scores.query.shape
    whole = torch.zeros(b, h, t, scores.key.shape[2], dtype=scores.query.dtype)
    for queries in scores.blocks(1):
        weights, keys = scores.weights(queries)
        whole[:, :, queries, keys] = weights
    return whole


@pytest.mark.parametrize("size", [1, 4, T])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", MASKS)
def test_weights_equal_those_of_single_rows(
    name: str, variant: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "AT_A_TIME", 1)
    monkeypatch.setattr(stream, "LEAST", size)
    query, key, options = tensors(VARIANTS[variant])
    found = weights_of(ScoreBlocks.of(query, key, Visibility.of(MASKS[name](), (B, T, T)), ScoreOptions(**options)))
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
        assert found[b, h, t].tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_lazy_mask_is_the_whole_one_in_any_operation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "AT_A_TIME", 1)
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
