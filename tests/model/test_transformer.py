"""The native Transformer and its search, against slow ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headscope.heads import HeadId, Site
from headscope.model.native.beams import STORY_SEARCH, Hypothesis, SearchConfig, search
from headscope.model.native.layers import Attention
from headscope.model.native.transformer import Transformer
from headscope.model.projections import projections
from headscope.model.taps import capture, gated
from tests.oracles import beam as slow
from tests.oracles import native

VARIANTS: dict[str, dict[str, Any]] = {
    "post": {},
    "pre": {"norm": "pre", "final_norm": True, "norm_epsilon": 1e-6},
    "story": {"norm": "pre", "final_norm": True, "embedding_bias": True, "model": {"start": "zero"}},
    "fairseq": {"position_offset": 2, "embedding_norm": True, "model": {"tie_output": True, "output_bias": True}},
    "learned": {"positions": "learned", "max_positions": 11, "position_offset": 2, "activation": "gelu"},
    "plain": {"positions": "none", "scale_embedding": False, "qkv_bias": False, "attention_bias": False},
    "projected": {"d_embedding": 3, "model": {"d_output": 2}},
    "slice": {"head_input": "slice", "d_model": 15},
    "shared": {"head_input": "slice", "d_model": 15, "shared_qkv": True},
    "mixed": {"self_mixing": "alpha.v1", "norm": "pre"},
}
every_variant = pytest.mark.parametrize("name", VARIANTS)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-10)


@every_variant
def test_logits_are_those_of_the_slow_model_also_with_padding(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    logits = model(source, target, source_mask=source_mask, target_mask=target_mask)
    for n in range(3):
        s, t = source[n][source_mask[n]].tolist(), target[n][target_mask[n]].tolist()
        assert_close(logits[n, : len(t)], native.logits(model, s, t))


@every_variant
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    right = model(source, target, source_mask=source_mask, target_mask=target_mask)
    mirror = [row.flip(1) for row in (source, target, source_mask, target_mask)]
    for side, mask in ((mirror[0], mirror[2]), (mirror[1], mirror[3])):
        for n in range(3):
            side[n][mask[n]] = side[n][mask[n]].flip(0)
    left = model(mirror[0], mirror[1], source_mask=mirror[2], target_mask=mirror[3])
    assert_close(left[1, 3:], right[1, :2])


@every_variant
def test_decoding_step_by_step_is_the_full_forward(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, _ = native.texts()
    expected = model(source, target, source_mask=source_mask)
    state = model.begin(source, source_mask)
    for step in range(target.shape[1]):
        assert_close(model.step(target[:, step], state), expected[:, step])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_decoder_alone(norm: str) -> None:
    model = native.model(decoder_only=True, norm=norm, positions="learned", max_positions=7)
    _, target, _, target_mask = native.texts()
    logits = model(target=target, target_mask=target_mask)
    for n in range(3):
        t = target[n][target_mask[n]].tolist()
        assert_close(logits[n, : len(t)], native.logits(model, None, t))


def test_a_decoder_alone_goes_on_from_a_prompt() -> None:
    model = native.model(decoder_only=True, position_offset=2)
    _, target, _, _ = native.texts()
    state = model.begin(target[:, :4])
    for ids in (target[:, 3], target[:, 4]):
        logits = model.step(ids, state)
    assert_close(logits[0], native.logits(model, None, target[0].tolist())[-1])


def test_the_cache_follows_the_order_of_hypotheses() -> None:
    model = native.model(self_mixing="alpha.v1")
    source, target, source_mask, _ = native.texts()
    state = model.begin(source, source_mask)
    model.step(target[:, 0], state)
    order = torch.tensor([2, 0, 0, 1])
    state.select(order)
    logits = model.step(target[order, 1], state)
    assert_close(logits, model(source[order], target[order, :2], source_mask=source_mask[order])[:, -1])
    state.select(torch.tensor([0, 2, 1, 3]), same_sentence=True)  # rows 1 and 2 are of one sentence
    new_order = order[[0, 2, 1, 3]]
    logits = model.step(target[new_order, 2], state)
    assert_close(logits, model(source[new_order], target[new_order, :3], source_mask=source_mask[new_order])[:, -1])


def test_a_layer_without_heads_adds_its_bias_only() -> None:
    attention = Attention(native.config().decoder, 0, d_memory=13).double()
    torch.nn.init.normal_(attention.output.bias)
    assert_close(attention(torch.randn(2, 3, 13).double()), attention.output.bias.expand(2, 3, 13))
    assert sum(p.numel() for p in attention.parameters()) == 13


def test_capture_sees_every_site_in_full_and_step_by_step() -> None:
    model = native.model(self_mixing="alpha.v1")
    source, target, source_mask, _ = native.texts()
    with capture(model, ("weights", "context")) as full:
        model(source, target, source_mask=source_mask)
    with capture(model, ("weights", "context")) as stepwise:
        state = model.begin(source, source_mask)
        for step in range(5):
            model.step(target[:, step], state)
    assert len(full.calls) == 7
    for site_layer, calls in full.calls.items():
        for name in ("weights", "context"):
            if site_layer[0] is Site.ENCODER_SELF:
                assert_close(stepwise[site_layer][name], calls[0][name])
                continue
            for step, call in enumerate(stepwise.calls[site_layer]):
                row = calls[0][name][:, :, step : step + 1]
                assert_close(call[name], row[..., : call[name].shape[-1]])
    assert not full[Site.CROSS, 0]["weights"][1, :, :, 4:].any()


def test_training_differs_from_evaluation_only_by_dropout() -> None:
    model = native.model(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, context_dropout=0.1)
    source, target, _, _ = native.texts()
    plain = model(source, target)
    assert not torch.allclose(model.train()(source, target), plain)
    assert_close(model.eval()(source, target), plain)
    loss = model.train()(source, target).square().sum()
    loss.backward()
    without_gradient = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(".layers.1.self_attention." in name for name in without_gradient)  # the layer without heads


@pytest.mark.parametrize("name", ["post", "pre", "slice", "shared", "mixed"])
def test_a_gate_of_zero_is_a_head_without_output_columns(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    plain = model(source, target, **masks)
    for head in (HeadId(Site.ENCODER_SELF, 1, 1), HeadId(Site.DECODER_SELF, 2, 0), HeadId(Site.CROSS, 0, 2)):
        with gated(model, [head]):
            expected = model(source, target, **masks)
        output = projections(model)[head.site, head.layer].output
        assert output is not None
        original = output.weight.detach().clone()
        with torch.no_grad():
            output.weight[:, output.units[head.head]] = 0
        assert_close(model(source, target, **masks), expected)
        with torch.no_grad():
            output.weight.copy_(original)
        assert not torch.allclose(expected, plain)
    assert_close(model(source, target, **masks), plain)


START = END = 2
PAD, UNKNOWN = 1, 3


def build_model(seed: int = 0, **options: Any) -> Transformer:
    """A model whose distributions are neither flat nor sure, over a tiny vocabulary."""
    transformer = native.model(seed, **options)
    with torch.no_grad():
        transformer.output.weight.mul_(0.7)
    return transformer


def source_batch() -> tuple[Tensor, Tensor]:
    source, _, mask, _ = native.texts()
    return source, mask


def next_log_p(model: Transformer, source: Tensor, mask: Tensor, start: int = START) -> slow.NextLogP:
    """The full model on every prefix, without any cache."""
    memory = model.encode(source[mask][None])
    cache: dict[tuple[int, ...], list[float]] = {}

    def look(ids: tuple[int, ...]) -> list[float]:
        if ids not in cache:
            states = model.decode(torch.tensor([[start, *ids]]), memory)
            cache[ids] = model.logits(states)[0, -1].log_softmax(-1).tolist()
        return cache[ids]

    return look


def assert_same(actual: list[Hypothesis], expected: slow.Beams) -> None:
    assert [h.ids for h in actual] == [ids for ids, _ in expected[: len(actual)]]
    assert [h.score for h in actual] == pytest.approx([score for _, score in expected[: len(actual)]], abs=1e-9)


def run_search(model: Transformer, source: Tensor, mask: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
    return search(model, source, mask, start=START, end=END, pad=PAD, unknown=UNKNOWN, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "seed"), [("pre", 0), ("post", 1)])
@pytest.mark.parametrize(("beam", "power", "min_length"), [(1, 1.0, 1), (3, 1.0, 1), (5, 0.0, 2), (7, 2.0, 0)])
def test_fairseq_rule_finds_what_lists_find(norm: str, seed: int, beam: int, power: float, min_length: int) -> None:
    transformer = build_model(seed, norm=norm)
    source, mask = source_batch()
    config = SearchConfig(beam=beam, best=beam, power=power, max_extra=6, min_extra=min_length)
    for n, actual in enumerate(run_search(transformer, source, mask, config)):
        look = next_log_p(transformer, source[n], mask[n])
        expected = slow.fairseq(look, beam=beam, end=END, pad=PAD, max_len=6, min_len=min_length, power=power)
        assert len(actual) == len(expected)
        assert_same(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("beam", "spread"), [(1, 3.0), (4, 3.0), (5, 0.4)])
def test_story_rule_finds_what_lists_find(beam: int, spread: float) -> None:
    transformer = build_model(beam, norm="pre", model={"start": "zero"})
    source, mask = source_batch()
    config = replace(STORY_SEARCH, beam=beam, best=beam, spread=spread)
    results = search(transformer, source, mask, start=0, end=END, config=config)
    for n, hypotheses in enumerate(results):
        length = int(mask[n].sum())
        look = next_log_p(transformer, source[n], mask[n], start=0)
        bounds = {"max_len": 2 * length + 3, "min_len": length // 4 - 1}
        assert_same(hypotheses, slow.story(look, beam=beam, end=END, power=0.6, spread=spread, **bounds))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
@pytest.mark.parametrize("seed", range(2))
def test_a_batch_finds_what_its_sentences_find_alone(rule: str, seed: int) -> None:
    transformer = build_model(seed)
    source, mask = source_batch()
    config = SearchConfig(beam=3, best=3, max_ratio=1.0, max_extra=3) if rule == "fairseq" else STORY_SEARCH
    results = run_search(transformer, source, mask, config)
    for n in range(3):
        (single,) = run_search(transformer, source[n][mask[n]][None], None, config)
        assert [h.ids for h in single] == [h.ids for h in results[n]]
        assert [h.score for h in single] == pytest.approx([h.score for h in results[n]], abs=1e-10)


@pytest.mark.slow
def test_length_bounds() -> None:
    source, mask = source_batch()
    config = SearchConfig(beam=3, max_ratio=1.0, max_extra=0, min_ratio=1.0, min_extra=0)
    results = run_search(build_model(2), source, mask, config)
    assert [len(best[0].ids) - 1 for best in results] == mask.sum(dim=1).tolist()
    short = run_search(build_model(2), source, mask, SearchConfig(beam=3, max_extra=50, min_extra=50, limit=4))
    assert [len(best[0].ids) for best in short] == [5, 5, 5]


@pytest.mark.slow
def test_capture_and_gates_reach_the_search() -> None:
    transformer = build_model(4)
    source, mask = source_batch()
    config = SearchConfig(beam=3, max_extra=5)
    with capture(transformer) as taps:
        plain = run_search(transformer, source, mask, config)
    steps = max(len(h.ids) for best in plain for h in best)
    assert len(taps.calls[Site.ENCODER_SELF, 0]) == 1
    for site in (Site.DECODER_SELF, Site.CROSS):
        calls = taps.calls[site, 0]
        assert len(calls) >= steps
        assert calls[0]["weights"].shape[0] == 3
        assert calls[1]["weights"].shape[:1] == (9,)
        assert all(torch.allclose(c["weights"].sum(-1), torch.ones(1).double()) for c in calls)
    heads = [HeadId(Site.CROSS, 0, head) for head in range(3)]
    with gated(transformer, heads):
        gated_results = run_search(transformer, source, mask, config)
    scores = [best[0].score for best in plain]
    assert [best[0].score for best in gated_results] != scores
    assert [best[0].score for best in run_search(transformer, source, mask, config)] == scores
