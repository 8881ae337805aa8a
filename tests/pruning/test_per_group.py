"""`--allocate per-group`: as many query heads in every group of a layer, layers as many as their scores say."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope as hs
from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.removal_plan import plan_removal
from headscope.pruning.gate_layout import GateLayout, gate_layout, unit_remarks
from headscope.pruning.options.shrink import ShrinkConfig
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.ranking.allocation import check_keep, per_group_keep
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.sweep.sweep import run_sweep
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


def test_protected_heads_stay_and_numbers_that_cannot_be_are_refused(model: hs.Model) -> None:
    sites = model.checkpoint.attention_sites
    safe = [HeadId(SELF, 1, head) for head in (0, 1, 2)]
    gates = gate_layout(sites, protect=safe, whole_groups=False)
    assert per_group_keep(gates, 0.0) == 6 and per_group_keep(gates, 0.6) == 10 and per_group_keep(gates, 1.0) == 16
    scores = scores_of(gates) | dict.fromkeys(safe, -1.0)
    gone = gates.closed(rank_heads(gates, 6, lambda gone: scores, allocation="per-group").kept)
    assert per_group(gates, gone) == [[0, 0], [3, 3]] and not set(gone) & set(safe)
    for keep, near in ((4, "keep 6"), (7, "keep 6 or 8")):
        with pytest.raises(ConfigError, match=f"--keep {keep}.*group.*{near}$"):
            check_keep(gates, keep, "per-group")
    with pytest.raises(ConfigError, match=r"; keep 2$"):  # --keep 0 is refused
        check_keep(gate_layout(sites, whole_groups=False), 1, "per-group")
    with pytest.raises(ConfigError, match="sites"):
        gate_layout(checkpoints.small().attention_sites, whole_groups=False)


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


@pytest.mark.parametrize("by", ["magnitude", "obs", "obs-measured"])
def test_the_api_ranks_so_by_parameters_and_in_closed_form(by: str) -> None:
    model = hs.load(decoders.decoder("qwen3"), tokenizer=decoders.byte_level())
    text = None if by == "magnitude" else ["a man walks", "two dogs run in the snow", "a red house"] * 11
    ranking = model.rank(by=by, text=text, allocate="per-group")
    gone = ranking.lowest(12)
    layers = [sorted(head.head // 2 for head in gone if head.layer == layer) for layer in range(3)]
    assert sum(map(len, layers)) == 12
    assert all(groups in ([], [0, 1, 2, 3], [0, 0, 1, 1, 2, 2, 3, 3]) for groups in layers)
    assert ranking.scores["score"].nunique() == 24
    with pytest.raises(ConfigError, match="'per-group'"):
        ranking.lowest(12, uniform=True)


def test_sweeps_rank_so_too(tmp_path: Path) -> None:
    path = decoders.saved(tmp_path / "whole", "qwen3", tokenizer=decoders.byte_level())
    (tmp_path / "text").write_text("a man walks\n" * 6, encoding="utf-8")
    given: dict[str, Any] = {"checkpoint": str(path), "source": tmp_path / "text", "valid_source": tmp_path / "text"}
    given |= {"methods": ("magnitude",), "keep_fraction": (0.5,), "allocate": "per-group", "seeds": 1}
    found = run_sweep(SweepConfig(**given, out=tmp_path / "sweep", metric="perplexity"))
    kept = found.table.query("method == 'magnitude'")
    assert kept["kept"].tolist() == [12]
    with pytest.raises(ConfigError, match=r"l0.*groups"):
        SweepConfig(
            **{**given, "methods": ("magnitude", "l0"), "keep_fraction": ()}, lambdas=(0.1,), out=tmp_path / "l0"
        )


def test_shrinking_for_laguna_chooses_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("a man walks\n", encoding="utf-8")
    given: dict[str, Any] = {"checkpoint": "CKPT", "out": tmp_path / "small", "source": tmp_path / "text"}
    assert ShrinkConfig(**given, export=("laguna",)).allocation == "per-group"
    assert ShrinkConfig(**given, export=("laguna",), allocate="global").allocation == "global"
