"""`prune rank --allocate uniform`: equal numbers of heads in every layer of a stack, and what can be made of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headscope as hs
from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.pruning.gate_layout import GateLayout, gate_layout
from headscope.pruning.ranking.allocation import uniform_counts, uniform_keep
from headscope.pruning.ranking.ranking import rank_heads
from headscope.pruning.removal import remove
from tests.makers import decoders
from tests.oracles import checkpoints


def scores_of(gates: GateLayout) -> dict[HeadId, float]:
    noise = torch.Generator().manual_seed(3)
    heads = [head for unit in gates.units for head in unit] + list(gates.protected)
    return dict(zip(sorted(heads), torch.rand(len(heads), generator=noise).tolist(), strict=True))


def test_every_layer_of_a_stack_keeps_its_best_in_equal_numbers(pair: hs.Model) -> None:
    gates = gate_layout(pair.checkpoint.attention_sites)
    scores, possible = scores_of(gates), 0
    for keep in range(1, gates.heads + 1):
        try:
            counts = uniform_counts(gates, keep)
        except ConfigError:
            continue
        possible += 1
        gone = set(gates.closed(rank_heads(gates, keep, lambda gone: scores, allocation="uniform").kept))
        assert len(gone) == gates.heads - keep
        for (site, layer), count in gates.counts.items():
            heads = [HeadId(site, layer, head) for head in range(count)]
            left = set(heads) - gone
            assert len(left) == counts["encoder" if site is Site.ENCODER_SELF else "decoder"]
            assert left == set(sorted(heads, key=lambda head: -scores[head])[: len(left)])
    assert possible >= 3


def test_shares_of_the_stacks_are_as_equal_as_can_be(pair: hs.Model) -> None:
    gates = gate_layout(pair.checkpoint.attention_sites)
    encoder = sum(site is Site.ENCODER_SELF for site, _ in gates.counts)
    layers = {"encoder": encoder, "decoder": len(gates.counts) - encoder}
    for fraction in (0.0, 0.4, 0.7, 1.0):
        counts = uniform_counts(gates, uniform_keep(gates, fraction))
        assert sum(counts[name] * layers[name] for name in layers) == uniform_keep(gates, fraction)
        assert all(count >= 1 for count in counts.values())
    assert len(set(uniform_counts(gates, sum(layers.values())).values())) == 1


@pytest.mark.slow
def test_what_it_chooses_is_a_plain_class(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remove, "timings", lambda *_, **__: [])
    path = decoders.saved(tmp_path / "whole", tokenizer=decoders.byte_level())
    ranked = ("prune", "rank", path, "--by", "magnitude", "--out", tmp_path / "ranked")
    options = (*ranked, "--remove", "--export", "native")
    status, _, said = command(*options, "--allocate", "uniform", "--keep-fraction", "0.7")
    assert status == 0, said
    small: Any = hs.load(str(tmp_path / "ranked" / "pruned")).model
    assert type(small).__name__ == "MistralForCausalLM" and small.config.num_attention_heads == 6


def test_groups_and_protected_heads_are_counted() -> None:
    sites = hs.load(decoders.decoder("llama")).checkpoint.attention_sites
    gates = gate_layout(sites, protect=[HeadId(Site.DECODER_SELF, 1, 5)])
    scores = scores_of(gates)
    kept = gates.without(gates.closed(rank_heads(gates, 12, lambda gone: scores, allocation="uniform").kept))
    assert [sum(head.layer == layer for head in kept) for layer in range(3)] == [4, 4, 4]
    assert set(kept) >= {HeadId(Site.DECODER_SELF, 1, 4), HeadId(Site.DECODER_SELF, 1, 5)}
    emptied = gate_layout(checkpoints.small().attention_sites)
    with pytest.raises(ConfigError, match="decoder"):
        uniform_keep(emptied, 0.5)
    with pytest.raises(ConfigError, match=r"--keep 10.*6 or 12"):
        uniform_counts(gates, 10)


def test_a_layer_whose_heads_are_all_protected_keeps_them() -> None:
    sites = hs.load(decoders.decoder("llama")).checkpoint.attention_sites
    gates = gate_layout(sites, protect=[HeadId(Site.DECODER_SELF, 0, head) for head in range(8)])
    with pytest.raises(ConfigError, match=r"--keep 12.*keep 24$"):  # it left 8, 4 and 4, which are 16
        rank_heads(gates, 12, lambda gone: scores_of(gates), allocation="uniform")
    assert bool(rank_heads(gates, 24, lambda gone: scores_of(gates), allocation="uniform").kept.all())
