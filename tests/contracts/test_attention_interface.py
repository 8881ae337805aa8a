"""Contracts of `attend`, `capture` and `gated` for every architecture in `architectures.py`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope.heads import HeadId, Site, SiteLayer
from headscope.model.discovery import find_attention
from headscope.model.forward import with_cache
from headscope.model.taps import Captured, capture, gated
from tests.contracts.architectures import (
    ARCHITECTURES,
    BY_NAME,
    Architecture,
    assert_near,
    build,
    closed_everywhere,
    every,
    inputs_of,
    logits,
    open_gates,
    parametrize,
    row_of,
    silence,
    text_only,
)
from tests.oracles.capturing import capture_once, weights_of

LENGTHS, TARGETS = (7, 3, 5), (5, 2, 3)  # the middle row is the shortest

generating = parametrize([architecture for architecture in ARCHITECTURES if architecture.generates])


@every
def test_every_head_is_found_where_the_config_has_it(architecture: Architecture) -> None:
    assert dict(find_attention(build(architecture)).layout) == architecture.layout


@every
def test_logits_in_double_precision_equal_eager_ones(
    architecture: Architecture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.functional, "softmax", in_full_precision(nn.functional.softmax))
    model, inputs = build(architecture, dtype="float64"), inputs_of(architecture, dtype=torch.float64)
    with capture(model):
        actual = logits(model, inputs)
    expected = logits(build(architecture, implementation="eager", dtype="float64"), inputs)
    assert actual.dtype == torch.float64
    assert_near(actual, expected, 1e-10)


def in_full_precision(softmax: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Many eager attentions take the softmax in float32 whatever the type; `attend` never rounds down."""

    def exact(scores: Tensor, dim: int, dtype: torch.dtype | None = None, **more: Any) -> Tensor:
        return softmax(scores, dim=dim, dtype=torch.float64 if scores.dtype == torch.float64 else dtype)

    return exact


@every
def test_captured_weights_equal_the_models_own(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    record = capture_once(model, **inputs)
    reference = own_weights(build(architecture, implementation="eager"), inputs)
    assert set(reference) == set(record.calls) == set(architecture.layout)
    for site_layer, expected in reference.items():
        assert len(record.calls[site_layer]) == 1
        assert_near(record[site_layer]["weights"], expected, 1e-6)


def own_weights(model: nn.Module, inputs: dict[str, Tensor]) -> dict[SiteLayer, Tensor]:
    """The attention weights that a transformers model itself returns."""
    with torch.no_grad():
        output = model(**inputs, output_attentions=True)
    if getattr(model.config, "is_encoder_decoder", False):
        sites = {
            Site.ENCODER_SELF: output.encoder_attentions,
            Site.DECODER_SELF: output.decoder_attentions,
            Site.CROSS: output.cross_attentions,
        }
    else:
        sites = {next(iter(find_attention(model).layout))[0]: output.attentions}
    return {(site, layer): weights for site, layers in sites.items() for layer, weights in enumerate(layers)}


@every
def test_captured_contexts_are_weights_times_values(architecture: Architecture) -> None:
    model = build(architecture)
    record = capture_once(model, ("weights", "value", "context", "query", "key"), **inputs_of(architecture))
    for site_layer, heads in architecture.layout.items():
        actual = record[site_layer]
        assert actual["query"].shape[1] == actual["key"].shape[1] == actual["value"].shape[1] == heads
        assert_near(actual["context"], actual["weights"] @ actual["value"], 1e-6)


@every
def test_gates_of_one_change_not_a_bit(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    with capture(model):
        expected = logits(model, inputs)
    with gated(model, open_gates(architecture.layout)):
        assert torch.equal(logits(model, inputs), expected)


@every
def test_a_zero_gate_equals_zeroing_the_heads_slice_of_the_output_projection(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    plain = logits(build(architecture, implementation="eager"), inputs)
    for site in {site for site, _ in architecture.layout}:
        for heads in ((0,), (1, architecture.layout[site, 0] - 1)):
            off = closed_everywhere(architecture.layout, site, heads)
            with gated(model, off):
                actual = logits(model, inputs)
            expected = logits(silence(build(architecture, implementation="eager"), off), inputs)
            assert_near(actual, expected, 1e-6)
            assert (actual - plain).abs().max() > 1e-3


@every
def test_a_gate_per_sentence_acts_on_its_sentence_only(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture, lengths=LENGTHS, targets=TARGETS)
    open_, shut = open_gates(architecture.layout), {p: 0 * g for p, g in open_gates(architecture.layout).items()}
    with gated(model, open_):
        plain = logits(model, inputs)
    with gated(model, shut):
        without = logits(model, inputs)
    with gated(model, {key: torch.stack([open_[key], shut[key], open_[key]]) for key in open_}):
        actual = logits(model, inputs)
    assert_near(actual, torch.stack([plain[0], without[1], plain[2]]), 1e-6)


@text_only
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_batch_equals_its_sentences_one_by_one(architecture: Architecture, side: str) -> None:
    if side == "left" and architecture.left == "no":
        pytest.skip("positions are counted from the first column, padding or not; nothing can be passed")
    model = build(architecture)
    inputs = inputs_of(architecture, lengths=LENGTHS, targets=TARGETS, left=side == "left")
    with capture(model) as together:
        actual = logits(model, inputs)
    for row in range(len(LENGTHS)):
        single = row_of(inputs, row)
        with capture(model) as alone:
            expected = logits(model, single)
        source = inputs["attention_mask"][row].bool()
        target = inputs.get("decoder_attention_mask", inputs["attention_mask"])[row].bool()
        real = {Site.ENCODER_SELF: (source, source), Site.DECODER_SELF: (target, target), Site.CROSS: (target, source)}
        last = real[Site.DECODER_SELF if architecture.decoder else Site.ENCODER_SELF][0]
        assert_near(actual[row, last], expected[0], 2e-5)
        for site_layer in architecture.layout:
            assert_row(together[site_layer]["weights"][row], alone[site_layer]["weights"][0], *real[site_layer[0]])


def assert_row(actual: Tensor, expected: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Weights [h t s] of a padded sentence are its own ones, and zero on padding."""
    assert_near(actual[:, queries][:, :, keys], expected, 2e-5)
    assert not actual[:, queries][:, :, ~keys].any()


@every
def test_half_precision_is_close_to_eager_and_rows_sum_to_one(architecture: Architecture) -> None:
    model, inputs = build(architecture, dtype="bfloat16"), inputs_of(architecture, dtype=torch.bfloat16)
    with capture(model) as record:
        actual = logits(model, inputs)
    expected = logits(build(architecture, implementation="eager", dtype="bfloat16"), inputs)
    assert actual.dtype == torch.bfloat16
    assert_near(actual.float(), expected.float(), 0.02)
    for site_layer in architecture.layout:
        sums = record[site_layer]["weights"].float().sum(dim=-1)
        assert sums.max() < 1.02
        assert architecture.sinks or sums.min() > 0.98


@generating
def test_token_by_token_gives_the_rows_of_one_pass(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    record = capture_once(model, **inputs, use_cache=False)
    stepwise = token_by_token(model, inputs)
    for (site, layer), heads in architecture.layout.items():
        expected = record[site, layer]["weights"][0]  # [h t s]
        calls = stepwise.calls[site, layer]
        if site is Site.ENCODER_SELF:
            assert_near(calls[0]["weights"][0], expected, 1e-5)
            continue
        assert len(calls) == expected.shape[1]
        for step, call in enumerate(calls):
            row = call["weights"][0, :, 0]  # [h s], s grows, or stays at the width of the window
            visible = expected[:, step] if site is Site.CROSS else expected[:, step, : step + 1]
            assert row.shape[0] == heads
            assert_near(row, visible[:, -row.shape[1] :], 1e-5)
            assert not visible[:, : -row.shape[1]].any()


def token_by_token(model: Any, inputs: dict[str, Tensor]) -> Captured:
    """Decode the given tokens one at a time, with the cache."""
    two_sided = "decoder_input_ids" in inputs
    ids = inputs["decoder_input_ids" if two_sided else "input_ids"]
    fixed: dict[str, Any] = {}
    cache = None
    with torch.no_grad(), capture(model) as record:
        if two_sided:
            states = model.get_encoder()(inputs["input_ids"], attention_mask=inputs["attention_mask"])
            fixed = {"encoder_outputs": states, "attention_mask": inputs["attention_mask"]}
        for step in range(ids.shape[1]):
            name = "decoder_input_ids" if two_sided else "input_ids"
            fixed[name] = ids[:, [step]]
            _, cache = with_cache(model, cache, **fixed)
    return record


@generating
def test_generating_with_gates_equals_generating_without_the_heads(architecture: Architecture) -> None:
    model = build(architecture)
    gates = [HeadId(*site_layer, 1) for site_layer in architecture.layout]
    without_heads = silence(build(architecture, implementation="eager"), gates)
    plain = generate(model, architecture)
    with gated(model, gates), capture(model) as record:
        actual = generate(model, architecture)
    expected = generate(without_heads, architecture)
    assert torch.equal(actual.sequences, expected.sequences)
    for step, other in zip(actual.logits, expected.logits, strict=True):
        assert_near(step, other, 1e-5)
    assert (actual.logits[0] - plain.logits[0]).abs().max() > 1e-3
    assert set(record.calls) == set(architecture.layout)


def generate(model: Any, architecture: Architecture) -> Any:
    """Seven new tokens, the likeliest at every step."""
    inputs = inputs_of(architecture, lengths=(7, 7))
    inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return model.generate(
        **inputs, max_new_tokens=7, min_new_tokens=7, do_sample=False, return_dict_in_generate=True, output_logits=True
    )


@every
def test_gradients_flow_through_attend_as_through_eager(architecture: Architecture) -> None:
    inputs = inputs_of(architecture)
    model, eager = build(architecture), build(architecture, implementation="eager")
    with capture(model):
        model(**inputs).logits.square().mean().backward()
    eager(**inputs).logits.square().mean().backward()
    for (name, mine), theirs in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (mine.grad is None) is (theirs.grad is None), name
        if mine.grad is not None:
            assert_near(mine.grad, theirs.grad, 1e-4)


def test_a_module_shared_between_layers_is_still_several_layers() -> None:
    architecture = BY_NAME["albert"]
    model, inputs = build(architecture), inputs_of(architecture)
    sites = find_attention(model)
    assert len({site.name for site in sites.order}) == 1
    weights = weights_of(capture_once(model, **inputs), Site.ENCODER_SELF)
    assert len(weights) == 3
    assert not torch.allclose(weights[0], weights[1]) and not torch.allclose(weights[1], weights[2])
    with capture(model) as record, gated(model, [HeadId(Site.ENCODER_SELF, 1, 0)]):
        logits(model, inputs)
    assert torch.equal(weights_of(record, Site.ENCODER_SELF)[1], weights[1])
    assert not torch.allclose(weights_of(record, Site.ENCODER_SELF)[2], weights[2])


@every
def test_gradients_flow_into_gates(architecture: Architecture) -> None:
    """The gradient of a gate is the sum of its head's context times the context's gradient (Michel 2019)."""
    model, inputs = build(architecture), inputs_of(architecture)
    gates = {site_layer: gate.requires_grad_() for site_layer, gate in open_gates(architecture.layout).items()}
    with gated(model, gates), capture(model, ("context",)) as record:
        loss = model(**inputs).logits.square().mean()
    contexts = {site_layer: record[site_layer]["context"] for site_layer in gates}
    gradients = torch.autograd.grad(loss, [*gates.values(), *contexts.values()])
    for gate, context, towards in zip(gradients[: len(gates)], contexts.values(), gradients[len(gates) :], strict=True):
        assert gate.abs().min() > 0
        assert_near(gate, (context * towards).sum(dim=(0, 2, 3)), 1e-4)


@every
def test_weights_that_a_model_returns_under_attend_are_the_captured_ones(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    with capture(model) as record:
        reference = own_weights(model, inputs)
    for site_layer, expected in reference.items():
        assert torch.equal(record[site_layer]["weights"], expected)
