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
every = pytest.mark.parametrize("name", VARIANTS)


def agree(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@every
def test_logits_are_those_of_the_slow_model_also_with_padding(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    found = model(source, target, source_mask=source_mask, target_mask=target_mask)
    for n in range(3):
        s, t = source[n][source_mask[n]].tolist(), target[n][target_mask[n]].tolist()
        agree(found[n, : len(t)], native.logits(model, s, t))


@every
def test_padding_on_the_left_changes_nothing(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    right = model(source, target, source_mask=source_mask, target_mask=target_mask)
    flipped = [row.flip(1) for row in (source, target, source_mask, target_mask)]
    for side, mask in ((flipped[0], flipped[2]), (flipped[1], flipped[3])):
        for n in range(3):
            side[n][mask[n]] = side[n][mask[n]].flip(0)
    left = model(flipped[0], flipped[1], source_mask=flipped[2], target_mask=flipped[3])
    agree(left[1, 3:], right[1, :2])


@every
def test_decoding_step_by_step_is_the_full_forward(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, _ = native.texts()
    expected = model(source, target, source_mask=source_mask)
    state = model.begin(source, source_mask)
    for step in range(target.shape[1]):
        agree(model.step(target[:, step], state), expected[:, step])


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_decoder_alone(norm: str) -> None:
    model = native.model(decoder_only=True, norm=norm, positions="learned", max_positions=7)
    _, target, _, target_mask = native.texts()
    found = model(target=target, target_mask=target_mask)
    for n in range(3):
        t = target[n][target_mask[n]].tolist()
        agree(found[n, : len(t)], native.logits(model, None, t))


def test_a_decoder_alone_goes_on_from_a_prompt() -> None:
    model = native.model(decoder_only=True, position_offset=2)
    _, target, _, _ = native.texts()
    state = model.begin(target[:, :4])
    for ids in (target[:, 3], target[:, 4]):
        found = model.step(ids, state)
    agree(found[0], native.logits(model, None, target[0].tolist())[-1])


def test_the_cache_follows_the_order_of_hypotheses() -> None:
    model = native.model(self_mixing="alpha.v1")
    source, target, source_mask, _ = native.texts()
    state = model.begin(source, source_mask)
    model.step(target[:, 0], state)
    order = torch.tensor([2, 0, 0, 1])
    state.select(order)
    found = model.step(target[order, 1], state)
    agree(found, model(source[order], target[order, :2], source_mask=source_mask[order])[:, -1])
    state.select(torch.tensor([0, 2, 1, 3]), same_sentence=True)  # rows 1 and 2 are of one sentence
    swapped = order[[0, 2, 1, 3]]
    found = model.step(target[swapped, 2], state)
    agree(found, model(source[swapped], target[swapped, :3], source_mask=source_mask[swapped])[:, -1])


def test_a_layer_without_heads_adds_its_bias_only() -> None:
    attention = Attention(native.config().decoder, 0, d_memory=13).double()
    torch.nn.init.normal_(attention.output.bias)
    agree(attention(torch.randn(2, 3, 13).double()), attention.output.bias.expand(2, 3, 13))
    assert sum(p.numel() for p in attention.parameters()) == 13


def test_capture_sees_every_site_in_full_and_step_by_step() -> None:
    model = native.model(self_mixing="alpha.v1")
    source, target, source_mask, _ = native.texts()
    with capture(model, ("weights", "context")) as whole:
        model(source, target, source_mask=source_mask)
    with capture(model, ("weights", "context")) as stepwise:
        state = model.begin(source, source_mask)
        for step in range(5):
            model.step(target[:, step], state)
    assert len(whole.calls) == 7
    for place, calls in whole.calls.items():
        for name in ("weights", "context"):
            if place[0] is Site.ENCODER_SELF:
                agree(stepwise[place][name], calls[0][name])
                continue
            for step, call in enumerate(stepwise.calls[place]):
                row = calls[0][name][:, :, step : step + 1]
                agree(call[name], row[..., : call[name].shape[-1]])
    assert not whole[Site.CROSS, 0]["weights"][1, :, :, 4:].any()


def test_training_differs_from_evaluation_only_by_dropout() -> None:
    model = native.model(dropout=0.3, attention_dropout=0.2, activation_dropout=0.1, context_dropout=0.1)
    source, target, _, _ = native.texts()
    plain = model(source, target)
    assert not torch.allclose(model.train()(source, target), plain)
    agree(model.eval()(source, target), plain)
    loss = model.train()(source, target).square().sum()
    loss.backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert all(".layers.1.self_attention." in name for name in unused)  # the layer without heads


@pytest.mark.parametrize("name", ["post", "pre", "slice", "shared", "mixed"])
def test_a_gate_of_zero_is_a_head_without_output_columns(name: str) -> None:
    model = native.model(**VARIANTS[name])
    source, target, source_mask, target_mask = native.texts()
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    plain = model(source, target, **masks)
    for head in (HeadId(Site.ENCODER_SELF, 1, 1), HeadId(Site.DECODER_SELF, 2, 0), HeadId(Site.CROSS, 0, 2)):
        with gated(model, [head]):
            closed = model(source, target, **masks)
        output = projections(model)[head.site, head.layer].output
        assert output is not None
        kept = output.weight.detach().clone()
        with torch.no_grad():
            output.weight[:, output.units[head.head]] = 0
        agree(model(source, target, **masks), closed)
        with torch.no_grad():
            output.weight.copy_(kept)
        assert not torch.allclose(closed, plain)
    agree(model(source, target, **masks), plain)


START = END = 2
PAD, UNKNOWN = 1, 3


def model(seed: int = 0, **options: Any) -> Transformer:
    """A model whose distributions are neither flat nor sure, over a tiny vocabulary."""
    made = native.model(seed, **options)
    with torch.no_grad():
        made.output.weight.mul_(0.7)
    return made


def sources() -> tuple[Tensor, Tensor]:
    source, _, mask, _ = native.texts()
    return source, mask


def next_log_p(made: Transformer, source: Tensor, mask: Tensor, start: int = START) -> slow.NextLogP:
    """The full model on every prefix, without any cache."""
    memory = made.encode(source[mask][None])
    known: dict[tuple[int, ...], list[float]] = {}

    def look(ids: tuple[int, ...]) -> list[float]:
        if ids not in known:
            states = made.decode(torch.tensor([[start, *ids]]), memory)
            known[ids] = made.logits(states)[0, -1].log_softmax(-1).tolist()
        return known[ids]

    return look


def same_hypotheses(found: list[Hypothesis], expected: slow.Beams) -> None:
    assert [h.ids for h in found] == [ids for ids, _ in expected[: len(found)]]
    assert [h.score for h in found] == pytest.approx([score for _, score in expected[: len(found)]], abs=1e-9)


def find(made: Transformer, source: Tensor, mask: Tensor | None, config: SearchConfig) -> list[list[Hypothesis]]:
    return search(made, source, mask, start=START, end=END, pad=PAD, unknown=UNKNOWN, config=config)


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "seed"), [("pre", 0), ("post", 1)])
@pytest.mark.parametrize(("beam", "power", "least"), [(1, 1.0, 1), (3, 1.0, 1), (5, 0.0, 2), (7, 2.0, 0)])
def test_fairseq_rule_finds_what_lists_find(norm: str, seed: int, beam: int, power: float, least: int) -> None:
    made = model(seed, norm=norm)
    source, mask = sources()
    config = SearchConfig(beam=beam, best=beam, power=power, max_extra=6, min_extra=least)
    for n, found in enumerate(find(made, source, mask, config)):
        look = next_log_p(made, source[n], mask[n])
        expected = slow.fairseq(look, beam=beam, end=END, pad=PAD, max_len=6, min_len=least, power=power)
        assert len(found) == len(expected)
        same_hypotheses(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("beam", "spread"), [(1, 3.0), (4, 3.0), (5, 0.4)])
def test_story_rule_finds_what_lists_find(beam: int, spread: float) -> None:
    made = model(beam, norm="pre", model={"start": "zero"})
    source, mask = sources()
    config = replace(STORY_SEARCH, beam=beam, best=beam, spread=spread)
    found = search(made, source, mask, start=0, end=END, config=config)
    for n, its in enumerate(found):
        length = int(mask[n].sum())
        look = next_log_p(made, source[n], mask[n], start=0)
        bounds = {"max_len": 2 * length + 3, "min_len": length // 4 - 1}
        same_hypotheses(its, slow.story(look, beam=beam, end=END, power=0.6, spread=spread, **bounds))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["fairseq", "story-of-heads"])
@pytest.mark.parametrize("seed", range(2))
def test_a_batch_finds_what_its_sentences_find_alone(rule: str, seed: int) -> None:
    made = model(seed)
    source, mask = sources()
    config = SearchConfig(beam=3, best=3, max_ratio=1.0, max_extra=3) if rule == "fairseq" else STORY_SEARCH
    together = find(made, source, mask, config)
    for n in range(3):
        (alone,) = find(made, source[n][mask[n]][None], None, config)
        assert [h.ids for h in alone] == [h.ids for h in together[n]]
        assert [h.score for h in alone] == pytest.approx([h.score for h in together[n]], abs=1e-10)


@pytest.mark.slow
def test_length_bounds() -> None:
    source, mask = sources()
    config = SearchConfig(beam=3, max_ratio=1.0, max_extra=0, min_ratio=1.0, min_extra=0)
    found = find(model(2), source, mask, config)
    assert [len(its[0].ids) - 1 for its in found] == mask.sum(dim=1).tolist()
    short = find(model(2), source, mask, SearchConfig(beam=3, max_extra=50, min_extra=50, limit=4))
    assert [len(its[0].ids) for its in short] == [5, 5, 5]


@pytest.mark.slow
def test_capture_and_gates_reach_the_search() -> None:
    made = model(4)
    source, mask = sources()
    config = SearchConfig(beam=3, max_extra=5)
    with capture(made) as seen:
        plain = find(made, source, mask, config)
    steps = max(len(h.ids) for its in plain for h in its)
    assert len(seen.calls[Site.ENCODER_SELF, 0]) == 1
    for site in (Site.DECODER_SELF, Site.CROSS):
        calls = seen.calls[site, 0]
        assert len(calls) >= steps
        assert calls[0]["weights"].shape[0] == 3
        assert calls[1]["weights"].shape[:1] == (9,)
        assert all(torch.allclose(c["weights"].sum(-1), torch.ones(1).double()) for c in calls)
    heads = [HeadId(Site.CROSS, 0, head) for head in range(3)]
    with gated(made, heads):
        closed = find(made, source, mask, config)
    assert [its[0].score for its in closed] != [its[0].score for its in plain]
    assert [its[0].score for its in find(made, source, mask, config)] == [its[0].score for its in plain]
