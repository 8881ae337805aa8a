"""Swaps of heads: what moves, what undoes them, files of schedules, and the fork's ways."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.model.native.transformer import Transformer
from headscope.training.head_scores import (
    FORK_SELECTIONS,
    SELECTIONS,
    Phase,
    SwapScores,
    SwapTiming,
    decide,
    head_scores,
)
from headscope.training.prepare import collate, plan_lengths
from headscope.training.swaps import Swap, read_schedule, swap_heads, swap_heads_like_fork
from tests.makers.shared import SHIPPED_FOLDER
from tests.oracles import growth, mhr, native
from tests.oracles.swaps import differing, head_rows, state

NAMES = {
    Site.ENCODER_SELF: "encoder.layers.{}.self_attention",
    Site.DECODER_SELF: "decoder.layers.{}.self_attention",
    Site.CROSS: "decoder.layers.{}.cross_attention",
}


def swap(text: str) -> Swap:
    return Swap(*map(HeadId.parse, text.split()))


def rows(model: Transformer, head: HeadId) -> dict[str, torch.Tensor]:
    return head_rows(model, NAMES[head.site].format(head.layer), head.head)


@pytest.mark.parametrize("text", ["cross.0.2 cross.1.0", "encoder-self.0.1 encoder-self.0.2"])
@pytest.mark.parametrize("output", [False, True])
def test_two_heads_change_places_and_nothing_else_moves(text: str, output: bool) -> None:
    model, pair = native.model(), swap(text)
    before, first, second = state(model), rows(model, pair.first), rows(model, pair.second)
    swap_heads(model, [pair], output=output)
    new_first, new_second = rows(model, pair.first), rows(model, pair.second)
    for name in first:
        moves = output or name != "output.weight"
        assert torch.equal(new_first[name], (second if moves else first)[name])
        assert torch.equal(new_second[name], (first if moves else second)[name])
    prefixes = {NAMES[head.site].format(head.layer) for head in (pair.first, pair.second)}
    assert all(any(key.startswith(name) for name in prefixes) for key in differing(before, state(model)))
    swap_heads(model, [pair], output=output)
    assert not differing(before, state(model))


def test_a_sliced_head_takes_along_what_it_reads() -> None:
    model = native.model(d_model=12, head_input="slice")
    source, target, *_ = native.texts()
    before = model(source, target)
    swap_heads(model, [swap("encoder-self.0.0 encoder-self.0.2")], output=True)
    torch.testing.assert_close(model(source, target), before, rtol=0, atol=1e-12)
    shared = native.model(d_model=12, head_input="slice", shared_qkv=True)
    with pytest.raises(ConfigError, match="projection"):
        swap_heads(shared, [swap("encoder-self.0.0 encoder-self.0.2")])


def test_moments_follow_the_weights_they_belong_to() -> None:
    """One step of swapped model and moments is the step of the model as it was, swapped."""
    swaps = [swap("cross.0.2 cross.1.0"), swap("decoder-self.0.1 decoder-self.2.2")]
    ends = []
    for early in (True, False):
        torch.manual_seed(0)
        model = native.model()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(3)
        slopes = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
        for step in range(2):
            if step == 1 and early:
                swap_heads(model, swaps, optimizer=optimizer)
            for parameter, slope in zip(model.parameters(), slopes, strict=True):
                parameter.grad = slope.clone() if step == 0 else torch.zeros_like(slope)
            optimizer.step()
        if not early:
            swap_heads(model, swaps)
        ends.append(state(model))
    assert not differing(*ends)
    model = native.model()
    swap_heads(model, swaps, optimizer=torch.optim.Adam(model.parameters()))  # no moments yet


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cross.0.0 cross.3.0", "cross.3.0.*cross 3 × 3/2/1"),
        ("cross.0.0 cross.2.1", "cross.2.1"),
        ("cross.0.0 decoder-self.0.0", "sites"),
        ("cross.0.0 cross.0.0", "same head"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_moves(text: str, message: str) -> None:
    model = native.model()
    before = state(model)
    with pytest.raises(ConfigError, match=message):
        swap_heads(model, [swap("cross.0.0 cross.1.0"), swap(text)])
    assert not differing(before, state(model))


LAYOUT = {(site, layer): 8 for site in Site for layer in range(3)}


def test_the_forks_file_is_read() -> None:
    schedule = read_schedule(SHIPPED_FOLDER / "mhr/data/swap.json", LAYOUT)
    assert {epoch: [str(pair) for pair in swaps] for epoch, swaps in schedule.items()} == {
        3: ["cross.0.0 ↔ cross.2.0", "cross.0.1 ↔ cross.2.1", "cross.0.2 ↔ cross.2.5",
            "encoder-self.1.6 ↔ encoder-self.1.3"]
    }  # fmt: skip


def entry(**fields: Any) -> dict[str, Any]:
    record = {
        "s_layer": "0", "s_head": 1, "s_layer_module": "encoder_attn", "s_transformer_module": "decoder",
        "d_layer": "2", "d_head": 1, "d_layer_module": "encoder_attn", "d_transformer_module": "decoder",
    } | fields  # fmt: skip
    return {name: value for name, value in record.items() if value is not None}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], "dictionary"),
        ({}, "swap"),
        ({"three": []}, "three.*integer"),
        ({"0": [entry()]}, "0.*greater than or equal to 1"),
        ({"3": {}}, "3.*list"),
        ({"3": [entry(), entry(s_layer="7")]}, "epoch 3, swap 2: this model has no head cross.7.1;"),
        ({"3": [entry(d_head=None)]}, r"3.1.d_head: Field required"),
        ({"3": [entry(head=1)]}, "3.1.head: Extra inputs"),
        ({"3": [entry(s_layer=None, s_layre="0")]}, r"3.1.s_layer: Field required"),
        ({"3": [entry(s_head="1")]}, "s_head.*integer.*1"),
        ({"3": [entry(d_layer_module="enc_attn")]}, "d_layer_module.*self_attn.*enc_attn"),
        ({"3": [entry(s_transformer_module="encoder")]}, "encoder_attn"),
        ({"3": [entry(d_layer_module="self_attn")]}, "swap 1: cross.0.1 ↔ decoder-self.2.1"),
    ],
)
def test_broken_schedules_are_refused_by_file_and_entry(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "swaps.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"swaps.json.*{message}"):
        read_schedule(path, LAYOUT)


def course(timing: SwapTiming, epochs: int) -> dict[int, str]:
    """What happens after each epoch."""
    actions: dict[int, str] = {}
    phase = Phase()
    for epoch in range(1, epochs + 1):
        action, phase = decide(phase, epoch + 1, timing)
        if action == "swap":
            phase = Phase((swap("cross.0.0 cross.1.1"),), phase.last)
        if action != "nothing":
            actions[epoch] = action
    return actions


def test_when_swaps_happen_is_what_the_fork_was_seen_to_do() -> None:
    """mhr.md §3.3: two runs of the original."""
    assert course(SwapTiming(start=3, end=12, frequency=2, pause=1), 20) == {
        2: "swap", 4: "undo", 5: "swap", 7: "undo", 8: "swap", 10: "undo", 11: "swap", 12: "undo",
    }  # fmt: skip
    assert course(SwapTiming(start=2, end=9, frequency=1, pause=2), 20) == {
        1: "swap", 2: "undo", 4: "swap", 5: "undo", 7: "swap", 8: "undo",
    }  # fmt: skip
    assert course(SwapTiming(start=2, end=0, frequency=1), 9) == {}
    assert course(SwapTiming(start=1, end=9, frequency=2, pause=1), 6) == {2: "swap", 4: "undo", 5: "swap"}
    endless = {1: "swap", 2: "undo", 3: "swap", 4: "undo", 5: "swap"}
    assert course(SwapTiming(start=2, end=None, frequency=1), 5) == endless


def choice(scores: list[list[float]], limit: int) -> SwapScores:
    table = {layer: torch.tensor(row) for layer, row in enumerate(scores)}
    return SwapScores(Site.CROSS, table, limit, torch.Generator().manual_seed(0), depth=len(scores))


SCORES = [[0.5, 0.1, 0.9, 0.3], [0.2, 0.8, 0.4, 0.6], [0.7, 0.35, 0.05, 1.0], [0.15, 0.25, 0.45, 0.55]]


def pairs(name: str, limit: int, *, fork: bool = False) -> list[str]:
    ways = FORK_SELECTIONS if fork else SELECTIONS
    return [f"{s.first}-{s.second}".replace("cross.", "") for s in ways[name](choice(SCORES, limit))]


def test_which_heads_are_chosen() -> None:
    """Sorted by hand: weakest 2.2 1→0.1 3.0 1.0, strongest 2.3 0.2 1.1."""
    assert pairs("hard", 3) == ["1.1-3.0", "0.2-0.1", "2.3-2.2"]
    assert pairs("hard", 3, fork=True) == pairs("hard", 3)
    assert pairs("soft", 2) == ["0.1-3.0", "0.3-3.1", "1.0-2.2", "1.2-2.1"]
    assert pairs("local", 1) == ["0.2-0.1", "1.1-1.0", "2.3-2.2", "3.3-3.0"]
    assert pairs("soft", 1, fork=True) == ["0.1-3.1", "0.3-3.3", "0.0-3.0", "0.2-3.2"]
    assert pairs("local", 1, fork=True) == ["0.1-3.1", "1.0-2.0", "2.2-1.2"]
    sample = pairs("random", 8)
    ends = [head for pair in sample for head in pair.split("-")]
    assert len(set(ends)) == len(ends) == 16
    assert sample != pairs("hard", 8)
    assert all(pairs(name, 0, fork=True) == [] for name in FORK_SELECTIONS)


def test_a_layer_without_heads_is_named() -> None:
    scores = SwapScores(Site.CROSS, {1: torch.rand(4), 2: torch.rand(4)}, 1, torch.Generator(), depth=3)
    with pytest.raises(ConfigError, match="layer 0"):
        FORK_SELECTIONS["local"](scores)


def fork_scores(oracles: Path, score: str) -> Mapping[Site, Mapping[int, torch.Tensor]]:
    """Of all sentences of the oracle, in padded batches."""
    checkpoint, corpus = mhr.load_reference(oracles)
    pairs = mhr.pairs(checkpoint, corpus)
    groups = plan_lengths(*pairs.lengths(), tokens=2048, chance=np.random.default_rng(0))
    return head_scores(checkpoint.model, [collate(pairs, group) for group in groups], score=score)


@pytest.mark.slow
@pytest.mark.parametrize("score", ["base", "advanced", "pairwise"])
def test_the_forks_scores_are_the_references(score: str, oracles: Path) -> None:
    """In padded batches, against the fork's batches of one."""
    reference = np.load(oracles / "mhr/alpha/oracle/tf_stats.npz")
    for site, layers in fork_scores(oracles, score).items():
        for layer, values in layers.items():
            expected = reference[f"conf_{score}/{growth.KEYS[site].format(layer)}"].mean(axis=0)
            np.testing.assert_allclose(values.numpy(), expected, rtol=2e-5)


@pytest.mark.slow
def test_hard_swaps_of_the_forks_scores(shared: Path) -> None:
    reference = np.load(shared / "oracles/mhr/alpha/oracle/tf_stats.npz")
    scores = fork_scores(shared / "oracles", "pairwise")[Site.CROSS]
    swaps = SELECTIONS["hard"](SwapScores(Site.CROSS, scores, 2, torch.Generator()))
    expected = np.stack([reference[f"conf_pairwise/decoder.{n}.enc_attn"].mean(axis=0) for n in range(3)])
    order = [f"cross.{n // 8}.{n % 8}" for n in np.argsort(expected.ravel())]
    assert [str(pair) for pair in swaps] == [f"{order[-2]} ↔ {order[1]}", f"{order[-1]} ↔ {order[0]}"]
    assert str(swaps[0]) == "cross.1.0 ↔ cross.0.3"  # with the last cell 2.1 would be ahead of 1.0


def test_the_fork_exchanges_whole_matrices_for_heads_0_only() -> None:
    checkpoint, _ = mhr.load_reference(SHIPPED_FOLDER)
    model, before = checkpoint.model, state(checkpoint.model)
    (first, *later), *_ = read_schedule(SHIPPED_FOLDER / "mhr/data/swap.json", None).values()
    swap_heads_like_fork(model, [first])
    keys = differing(before, state(model))
    parts = {f"decoder.layers.{n}.cross_attention." for n in (0, 2)}
    names = {f"{part}.{kind}" for part in ("query", "key", "value") for kind in ("weight", "bias")} | {"mixing.alpha"}
    assert keys == {part + name for part in parts for name in names}
    for layer, source in ((0, 2), (2, 0)):
        key = "decoder.layers.{}.cross_attention.mixing.alpha"
        assert torch.equal(model.state_dict()[key.format(layer)], before[key.format(source)])
    swap_heads_like_fork(model, [first])
    swap_heads_like_fork(model, later)
    keys = differing(before, state(model))
    assert not any("alpha" in name for name in keys) and "encoder.layers.1.self_attention.key.weight" in keys
    swap_heads(model, [Swap(HeadId(Site.CROSS, 0, 1), HeadId(Site.CROSS, 2, 1)), swap("cross.0.2 cross.2.5")])
    swap_heads(model, [swap("encoder-self.1.6 encoder-self.1.3")])
    assert not differing(before, state(model))  # away from head 0 both ways are the same
