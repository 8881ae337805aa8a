"""The model after capture and gates is the model before; blocks nest, and models do not mix."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headscope.errors import CheckpointError
from headscope.heads import HeadId, Site
from headscope.model.discovery import find_attention
from headscope.model.projections import projections
from headscope.model.taps import capture, gated
from headscope.model.transformers_attention import attend_interface
from tests.contracts.architectures import (
    BY_NAME,
    Architecture,
    assert_near,
    build,
    closed_everywhere,
    every,
    inputs_of,
    logits,
    open_gates,
)
from tests.oracles.capturing import capture_once


@every
def test_the_model_is_as_before_after_the_block(architecture: Architecture) -> None:
    model, inputs = make_uneven(build(architecture)), inputs_of(architecture)
    before, expected = state_of(model), seeded_logits(model, inputs)
    with capture(model), gated(model, open_gates(architecture.layout)):
        seeded_logits(model, inputs)
        assert state_of(model) != before  # the comparison sees what it should
    projections(model)
    assert state_of(model) == before
    assert torch.equal(seeded_logits(model, inputs), expected)


@every
def test_the_model_is_as_before_after_an_exception(architecture: Architecture) -> None:
    model, inputs = make_uneven(build(architecture)), inputs_of(architecture)
    before, expected = state_of(model), seeded_logits(model, inputs)
    with pytest.raises(KeyError, match="halfway"), gated(model, open_gates(architecture.layout)), capture(model):
        run_interrupted(model, inputs)
    assert state_of(model) == before
    assert torch.equal(seeded_logits(model, inputs), expected)
    with capture(model) as record:
        seeded_logits(model, inputs)
    assert {key: len(calls) for key, calls in record.calls.items()} == dict.fromkeys(architecture.layout, 1)


def run_interrupted(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """A forward pass that fails in the middle of the layers."""
    last = [part for part in model.modules() if "Norm" in type(part).__name__][-1]
    handle = last.register_forward_pre_hook(fail)
    try:
        seeded_logits(model, inputs)
    finally:
        handle.remove()


def fail(*_: Any) -> None:
    raise KeyError("halfway")


def make_uneven(model: nn.Module) -> nn.Module:
    """Some parts in training, some parameters frozen, one hook: as a fine-tuning script may leave it."""
    for number, part in enumerate(model.modules()):
        part.training = number % 3 == 1
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 2 == 0)
    model.register_forward_hook(lambda *_: None)
    return model


def state_of(model: nn.Module) -> dict[str, Any]:
    """Everything about a model that a block could leave changed."""
    configs: dict[int, Any] = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    forwards: list[Any] = [part.forward for part in model.modules()]
    tables = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return {
        "implementations": {key: config._attn_implementation for key, config in configs.items()},
        "configs": {key: config.to_json_string() for key, config in configs.items()},
        "hooks": [[len(getattr(part, table)) for table in tables] for part in model.modules()],
        "attributes": [sorted(vars(part)) for part in model.modules()],
        "forwards": [forward.__func__ for forward in forwards],
        "training": [part.training for part in model.modules()],
        "frozen": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [parameter.grad is None for parameter in model.parameters()],
        "sums": [parameter.double().sum().item() for parameter in model.parameters()],
        "random": torch.get_rng_state().tolist(),
    }


def seeded_logits(model: nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Logits with dropout drawn from a fixed seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return logits(model, inputs)


@every
def test_capture_and_gates_nest_either_way(architecture: Architecture) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    gates = [HeadId(site, layer, 1) for site, layer in architecture.layout]
    with gated(model, gates):
        expected = logits(model, inputs)
        with capture(model, ("weights", "context")) as inside:
            assert torch.equal(logits(model, inputs), expected)
        assert torch.equal(logits(model, inputs), expected)
    with capture(model, ("weights", "context")) as outside, gated(model, gates):
        assert torch.equal(logits(model, inputs), expected)
    for site_layer in architecture.layout:
        assert len(inside.calls[site_layer]) == len(outside.calls[site_layer]) == 1
        assert torch.equal(inside[site_layer]["weights"], outside[site_layer]["weights"])
        assert torch.equal(inside[site_layer]["context"], outside[site_layer]["context"])
        assert inside[site_layer]["context"][:, 1].any()  # what is captured is before the gates


def test_gates_multiply_when_nested() -> None:
    architecture = BY_NAME["bart"]
    model, inputs = build(architecture), inputs_of(architecture)
    halves = {site_layer: gate / 2 for site_layer, gate in open_gates(architecture.layout).items()}
    with gated(model, {site_layer: gate / 4 for site_layer, gate in open_gates(architecture.layout).items()}):
        expected = logits(model, inputs)
    with gated(model, halves), gated(model, halves):
        assert torch.equal(logits(model, inputs), expected)


# Arguments that would be ignored.


@every
@pytest.mark.parametrize("name", ["head_mask", "decoder_head_mask", "cross_attn_head_mask"])
def test_a_head_mask_is_refused_by_name(architecture: Architecture, name: str) -> None:
    model, inputs = build(architecture), inputs_of(architecture)
    with capture(model), pytest.raises(CheckpointError, match=f"^{name}=.*gated"):
        logits(model, inputs, **{name: torch.zeros(2, 3)})


def test_an_argument_of_attention_that_is_unknown_is_refused_by_name() -> None:
    states = torch.randn(2, 3, 5, 7)
    with pytest.raises(CheckpointError, match="'alibi'"):
        attend_interface(nn.Linear(1, 1), states, states, states, None, alibi=torch.ones(3))
    attend_interface(nn.Linear(1, 1), states, states, states, None, alibi=None, is_causal=True)


def test_an_argument_that_a_caller_invents_reaches_attention_and_is_refused() -> None:
    model = build(BY_NAME["llama"])
    with capture(model), pytest.raises(CheckpointError, match="'attention_temperature'"):
        logits(model, inputs_of(BY_NAME["llama"]), attention_temperature=2.0)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_checkpointing_is_refused_while_it_would_run_layers_twice(name: str) -> None:
    model = build(BY_NAME[name])
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    with capture(model) as record:
        logits(model, inputs_of(BY_NAME[name]))
    assert [len(calls) for calls in record.calls.values()] == [1, 1]
    model.train()
    with pytest.raises(CheckpointError, match=r"^gradient checkpointing"), capture(model):
        pass


def test_a_model_that_was_rebuilt_is_probed_again() -> None:
    """Heads cut away in place, or another layer put in: nothing is gated by a stale table."""
    model = build(BY_NAME["bert"])
    assert find_attention(model) is find_attention(model)
    inner = model.bert.encoder.layer[1].attention
    for part in (inner.self.query, inner.self.key, inner.self.value):
        part.weight, part.bias = nn.Parameter(part.weight[:10]), nn.Parameter(part.bias[:10])
    inner.output.dense.weight = nn.Parameter(inner.output.dense.weight[:, :10])
    assert list(find_attention(model).layout.values()) == [3, 2]
    model.bert.encoder.layer = model.bert.encoder.layer[1:]
    assert list(find_attention(model).layout.values()) == [2]


def test_a_copy_of_a_model_has_places_of_its_own() -> None:
    model, inputs = build(BY_NAME["bert"]), inputs_of(BY_NAME["bert"])
    expected = capture_once(model, **inputs)
    twin = copy.deepcopy(model)
    with capture(model) as of_model, capture(twin) as of_twin:
        logits(twin, inputs)
    assert not of_model.calls
    assert torch.equal(of_twin[Site.ENCODER_SELF, 0]["weights"], expected[Site.ENCODER_SELF, 0]["weights"])


@pytest.mark.parametrize(("first", "second"), [("bert", "gpt2"), ("bart", "bart"), ("albert", "t5")])
def test_two_models_at_once_keep_their_heads_apart(first: str, second: str) -> None:
    left, right = build(BY_NAME[first]), build(BY_NAME[second])
    texts = inputs_of(BY_NAME[first]), inputs_of(BY_NAME[second], lengths=(3,))
    expected = capture_once(left, **texts[0]), capture_once(right, **texts[1])
    plain = logits(right, texts[1])
    shut = closed_everywhere(BY_NAME[first].layout, next(iter(BY_NAME[first].layout))[0], (0, 1, 2))
    with capture(left) as left_record, capture(right) as right_record, gated(left, shut):
        gated_right = logits(right, texts[1])
        logits(left, texts[0])
    assert_near(gated_right, plain, 1e-5)
    assert [len(calls) for calls in left_record.calls.values()] == [1] * len(BY_NAME[first].layout)
    for site_layer in BY_NAME[second].layout:
        assert torch.equal(right_record[site_layer]["weights"], expected[1][site_layer]["weights"])
    first_place = next(iter(BY_NAME[first].layout))
    assert torch.equal(left_record[first_place]["weights"], expected[0][first_place]["weights"])
