"""Passes that start at the ablated layer equal full passes, for every architecture."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headscope.attribution.gatevector import split_gates
from headscope.data.encoded import Batch, Encoded, pad_side
from headscope.evaluation.likelihood import LabelledBatch, score_under_masks
from headscope.formats.huggingface.checkpoint import checkpoint_in_memory
from headscope.heads import Layout, SiteLayer, all_heads
from headscope.model.discovery import find_attention
from headscope.model.prefix_cache import PrefixCache, SharedLayers, index_layers, resumable_layers
from headscope.model.taps import gated
from tests.contracts.architectures import BY_NAME, Architecture, assert_near, build, every, inputs_of
from tests.oracles import native

LENGTHS: dict[str, Any] = {"lengths": (3, 7, 5), "targets": (5, 2, 4)}
SHARED_LAYERS = {"albert"}  # one module is all layers: computed in full


def open_gates(layout: Layout) -> dict[SiteLayer, Tensor]:
    return split_gates(torch.ones(sum(layout.values()), dtype=torch.float64), layout)


def gates_without(layout: Layout, head: Any) -> dict[SiteLayer, Tensor]:
    gates = open_gates(layout)
    gates[head.site, head.layer] = gates[head.site, head.layer].clone()
    gates[head.site, head.layer][head.head] = 0
    return gates


@every
def test_every_head_off_equals_a_whole_pass(architecture: Architecture) -> None:
    """Every head of a model closed in turn, from the middle and in full."""
    model = build(architecture, dtype="float64")
    inputs = inputs_of(architecture, dtype=torch.float64, **LENGTHS)
    layout = find_attention(model).layout
    layer_index = resumable_layers(model)
    assert (layer_index is None) == (architecture.name in SHARED_LAYERS)

    def work() -> Tensor:
        result: Tensor = model(**inputs).logits
        return result

    with torch.no_grad():
        rerun = PrefixCache(model, work, layer_index)
        with rerun.activate():
            plain = rerun.value(open_gates(layout), keep=True)
            values = {head: rerun.value(gates_without(layout, head)) for head in all_heads(layout)}
            assert torch.equal(rerun.value(open_gates(layout)), plain)
        for head, value in values.items():
            with gated(model, [head]):
                assert_near(value, work(), 1e-12)
        assert all(not torch.equal(value, plain) for value in values.values())
        with gated(model, []):
            assert_near(plain, work(), 1e-12)
    assert not any("forward" in part.__dict__ for part in model.modules())


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5", "marian"])
def test_walk_that_opens_one_head_after_the_other(name: str) -> None:
    """Each pass is kept, and the next one starts from it."""
    architecture = BY_NAME[name]
    model = build(architecture, dtype="float64")
    inputs = inputs_of(architecture, dtype=torch.float64, **LENGTHS)
    layout = find_attention(model).layout
    gates = torch.zeros(sum(layout.values()), dtype=torch.float64)
    rerun = PrefixCache(model, lambda: model(**inputs).logits, index_layers(model))
    order = torch.randperm(len(gates), generator=torch.Generator().manual_seed(3)).tolist()
    with torch.no_grad():
        with rerun.activate():
            rerun.value(split_gates(gates.clone(), layout), keep=True)
            steps = []
            for head in order:
                gates[head] = 0.5 + head / 7
                steps.append((gates.clone(), rerun.value(split_gates(gates.clone(), layout), keep=True)))
        for step_gates, value in steps:
            with gated(model, split_gates(step_gates, layout)):
                assert_near(value, model(**inputs).logits, 1e-12)


def test_native_models_and_a_layer_without_heads() -> None:
    variants: list[dict[str, Any]] = [{}, {"norm": "pre"}, {"self_mixing": "alpha.v1"}]
    for options in variants:
        model = native.model(**options)
        layout = {site_layer: heads for site_layer, heads in find_attention(model).layout.items() if heads}
        work = partial(native.batch_logits, model)
        rerun = PrefixCache(model, work, resumable_layers(model))
        assert rerun.layer_index is not None
        with torch.no_grad():
            with rerun.activate():
                rerun.value(open_gates(layout), keep=True)
                values = {head: rerun.value(gates_without(layout, head)) for head in all_heads(layout)}
            for head, value in values.items():
                with gated(model, [head]):
                    assert_near(value, work(), 1e-12)


def test_layers_that_change_their_inputs_are_found_out() -> None:
    """A layer that writes into its input would corrupt the cache; such a model is computed in full."""
    model = build(BY_NAME["gpt2"])
    hook = model.base_model.h[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].mul_(1.5), *inputs[1:]))
    assert index_layers(model) is not None
    assert resumable_layers(model) is None
    hook.remove()
    assert resumable_layers(model) is not None


def test_everything_is_restored_after_an_error() -> None:
    model = build(BY_NAME["bert"], dtype="float64").train()
    inputs = inputs_of(BY_NAME["bert"], dtype=torch.float64)
    layout = find_attention(model).layout
    before = {name: list(part._forward_hooks) for name, part in model.named_modules()}
    forward = model.base_model.encoder.layer[0].forward
    model.base_model.encoder.layer[0].__dict__["forward"] = forward  # somebody else's replacement stays
    broken = False

    def work() -> Tensor:
        result: Tensor = model(**inputs).logits
        if broken:
            raise ArithmeticError
        return result

    rerun = PrefixCache(model, work, index_layers(model))
    last = gates_without(layout, list(all_heads(layout))[-1])
    with torch.no_grad():
        with pytest.raises(ArithmeticError), rerun.activate():
            expected = rerun.value(open_gates(layout), keep=True)
            broken = True
            rerun.value(last, keep=True)
        broken = False
        with rerun.activate():
            assert torch.equal(rerun.value(open_gates(layout), keep=True), expected), "the broken pass left nothing"
    assert model.training and all(part.training for part in model.modules())
    assert {name: list(part._forward_hooks) for name, part in model.named_modules()} == before
    assert [part for part in model.modules() if "forward" in part.__dict__] == [model.base_model.encoder.layer[0]]


@pytest.mark.parametrize("name", ["t5", "marian", "gpt2", "bert"])
def test_masks_that_share_layers_score_as_each_alone(name: str) -> None:
    checkpoint = checkpoint_in_memory(build(BY_NAME[name], dtype="float64").eval(), None)
    noise = torch.Generator().manual_seed(1)

    def ids(*shape: int) -> Tensor:
        return torch.randint(3, min(checkpoint.vocabularies), shape, generator=noise)

    source, target = (pad_side([Encoded.plain(ids(n).tolist()) for n in lengths]) for lengths in ((7, 4, 5), (5, 3, 4)))
    labels = ids(3, 5 if checkpoint.two_sided else 7)
    batch = Batch(torch.arange(3), 0, source, target if checkpoint.two_sided else None)
    part = LabelledBatch(batch, labels, 3, np.ones(3))
    masks = [[], *([head] for head in reversed([*all_heads(checkpoint.layout)]))]
    layers = SharedLayers.of(checkpoint.model)
    assert layers is not None
    with torch.inference_mode():
        shared, alone = (score_under_masks(checkpoint, part, masks, reuse) for reuse in (layers, None))
    assert all(map(torch.equal, shared, alone))
    assert len(shared[0].unique()) == shared[0].numel()
