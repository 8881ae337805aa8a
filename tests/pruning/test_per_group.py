"""`--allocate per-group`: as many query heads in every group of a layer, layers as many as their scores say."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

import headscope as hs
from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import plan_removal
from headscope.pruning.gate_layout import GateLayout, gate_layout, unit_remarks
from headscope.pruning.ranking.allocation import check_keep
from headscope.pruning.ranking.ranking import rank_heads
from tests.makers import decoders
from tests.oracles import checkpoints

SELF = Site.DECODER_SELF


@pytest.fixture(scope="module")
def model() -> hs.Model:
    return hs.load(decoders.decoder("qwen3", num_hidden_layers=2, num_key_value_heads=2))


def scores_of(gates: GateLayout) -> dict[HeadId, float]:
    noise = torch.Generator().manual_seed(5)
    heads = gates.without([])
    return dict(zip(heads, torch.rand(len(heads), generator=noise).tolist(), strict=True))


def per_group(gates: GateLayout, gone: list[HeadId]) -> list[list[int]]:
    """How many heads every group of every layer keeps."""
    kept = set(gates.without(gone))
    return [[sum(HeadId(SELF, layer, 4 * group + h) in kept for h in range(4)) for group in (0, 1)] for layer in (0, 1)]


@pytest.mark.parametrize("steps", [1, 3])
def test_what_goes_is_the_best_that_leaves_groups_of_one_size(model: hs.Model, steps: int) -> None:
    """Against all ways to keep as many of each group: none keeps a larger sum of scores."""
    gates = gate_layout(model.checkpoint.attention_sites, whole_groups=False)
    scores = scores_of(gates)
    for keep in range(0, 17, 2):
        gone = gates.closed(rank_heads(gates, keep, lambda gone: scores, steps=steps, allocation="per-group").kept)
        assert len(gone) == 16 - keep
        assert all(len(set(of_layer)) == 1 for of_layer in per_group(gates, gone))
        plan_removal(model.checkpoint.attention_sites, gone or [HeadId(SELF, 0, h) for h in range(8)])
        best = max(
            sum(
                max(sum(scores[HeadId(SELF, layer, 4 * group + h)] for h in some) for some in combinations(range(4), n))
                for layer, n in enumerate((first, keep // 2 - first))
                for group in (0, 1)
            )
            for first in range(5)
            if 0 <= keep // 2 - first <= 4
        )
        assert sum(scores[head] for head in gates.without(gone)) == pytest.approx(best)


def test_where_only_whole_layers_can_go_that_is_said_and_shares_of_them_are_refused() -> None:
    """A share of every layer emptied the last layers, whatever they score."""
    sites = hs.load(decoders.decoder("qwen3", num_key_value_heads=1)).checkpoint.attention_sites
    gates = gate_layout(sites)
    assert gates.whole_layers and "--allocate per-group" in unit_remarks(gates)[0]
    with pytest.raises(ConfigError, match=r"--allocate per-layer: all heads of a layer.*global, or per-group"):
        check_keep(gates, 16, "per-layer")
    check_keep(gates, 24, "per-layer")
    for single in (gate_layout(sites, whole_groups=False), gate_layout(checkpoints.small().attention_sites)):
        assert not unit_remarks(single)
    two = hs.load(decoders.decoder("qwen3", num_key_value_heads=2)).checkpoint.attention_sites
    assert not gate_layout(two).whole_layers
    assert not gate_layout(two, protect=[HeadId(SELF, layer, 0) for layer in range(3)]).whole_layers
