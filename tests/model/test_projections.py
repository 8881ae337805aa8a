"""Heads' slices of the projections, found from gradients, against expectations written by hand."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from headscope.heads import Site
from headscope.model.projections import Projections, Slices, projections
from tests.contracts.architectures import ARCHITECTURES, BY_NAME, Architecture, build, inputs_of, sharpen
from tests.oracles.capturing import capture_once

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)


def width_of(architecture: Architecture, heads: int) -> int:
    """Width of a head: written in the config, or the model's width over the heads."""
    sizes = architecture.sizes
    model = sizes.get("d_model") or sizes.get("hidden_size") or sizes.get("n_embd") or sizes.get("dim")
    width = sizes.get("head_dim") or sizes.get("d_kv")
    if width is None:
        assert model is not None
        width = model // heads
    return int(width)


def parts_of(slices: Projections) -> tuple[Slices | None, ...]:
    return (slices.query, slices.key, slices.value, slices.output)


@every_architecture
def test_slices_cover_every_projection_exactly_once(architecture: Architecture) -> None:
    for slices in projections(build(architecture)).values():
        coverage: dict[tuple[int, int], list[int]] = {}
        weights = {}
        for part in parts_of(slices):
            assert part is not None
            weights[id(part.weight)] = part.weight
            coverage.setdefault((id(part.weight), part.axis), []).extend(torch.cat(part.units).tolist())
        for (weight, axis), rows in coverage.items():
            assert sorted(rows) == list(range(weights[weight].shape[axis]))


@every_architecture
def test_matrices_of_a_head_make_its_query_and_its_context_from_the_input(architecture: Architecture) -> None:
    """Shapes [h k d] for each part: k rows that meet the model's width."""
    for (site, layer), slices in projections(build(architecture)).items():
        heads = architecture.layout[site, layer]
        for part in parts_of(slices):
            assert part is not None
            other = part.weight.shape[1 - part.axis]
            assert part.matrices().shape == (len(part.units), width_of(architecture, heads), other)


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt_neox", "modernbert", "llama"])
def test_the_values_slice_times_the_input_is_what_attention_was_given(name: str) -> None:
    model = build(BY_NAME[name])
    slices = projections(model)[next(iter(BY_NAME[name].layout))].value
    assert slices is not None
    owner = next(part for part in model.modules() if getattr(part, "weight", None) is slices.weight)
    attention_inputs: list[Tensor] = []
    hook = owner.register_forward_pre_hook(lambda _, inputs: attention_inputs.append(inputs[0]))
    taps = capture_once(model, ("value",), **inputs_of(BY_NAME[name]))
    hook.remove()
    values = torch.einsum("bsd,hkd->bhsk", attention_inputs[0], slices.matrices())
    if owner.bias is not None:
        values = values + torch.stack([owner.bias[unit] for unit in slices.units])[:, None]
    head_values = values.repeat_interleave(BY_NAME[name].layout[next(iter(BY_NAME[name].layout))] // len(values[0]), 1)
    torch.testing.assert_close(head_values, taps[next(iter(BY_NAME[name].layout))]["value"])


# Projections of other architectures, where a table would have to be told.


def causal_model(name: str) -> nn.Module:
    """A model with 6 heads in 2 groups, of width 10."""
    sizes = {key: size for key, size in BY_NAME["llama"].sizes.items() if key != "head_dim"}
    config = AutoConfig.for_model(name, **{**sizes, "hidden_size": 60})
    model: nn.Module = sharpen(AutoModelForCausalLM.from_config(config).eval())
    return model


def unit_columns(slices: Slices | None) -> Sequence[Sequence[int]]:
    assert slices is not None
    return [unit.tolist() for unit in slices.units]


def test_grouped_heads_in_one_fused_matrix_are_found() -> None:
    """Phi-3: 6 queries, then 2 keys, then 2 values."""
    slices = projections(causal_model("phi3"))[Site.DECODER_SELF, 1]
    assert unit_columns(slices.query) == [list(range(10 * i, 10 * i + 10)) for i in range(6)]
    assert unit_columns(slices.key) == [list(range(60, 70)), list(range(70, 80))]
    assert unit_columns(slices.value) == [list(range(80, 90)), list(range(90, 100))]


def test_a_gated_context_has_an_output_projection_where_its_gate_is_constant() -> None:
    """Contexts multiplied before the output projection: by a function of the input, by a constant, by nothing."""
    model = build(BY_NAME["llama"])
    gates: tuple[Callable[[Tensor], Tensor], ...] = (torch.sigmoid, lambda x: torch.full_like(x, 0.7))
    handles = [
        model.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(
            lambda _, inputs, gate=gate: (inputs[0] * gate(inputs[0]),)
        )
        for layer, gate in enumerate(gates)
    ]
    first, second = (projections(model)[Site.DECODER_SELF, layer].output for layer in (0, 1))
    handles[1].remove()
    plain = projections(model)[Site.DECODER_SELF, 1].output
    handles[0].remove()
    assert first is None
    assert second is not None and plain is not None
    assert second.gate == pytest.approx(0.7) and plain.gate == 1
    torch.testing.assert_close(second.weight, plain.weight * second.gate)
