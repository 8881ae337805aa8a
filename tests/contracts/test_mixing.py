"""Contracts of every mixing variant: identity at the start, no look ahead, gradients, folding, capture."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from headscope.errors import ConfigError
from headscope.evaluation.model_inputs import read_input_texts
from headscope.heads import HeadId, Site
from headscope.model.attention import repeat_groups, tap_contexts
from headscope.model.mixing.base import MIXINGS, Mixing, Queries, build_mixing
from headscope.model.native.transformer import Transformer, folded_weights
from headscope.model.removal_plan import plan_removal
from headscope.model.taps import capture
from headscope.pruning.removal.verify import verify
from tests.oracles import checkpoints, native
from tests.oracles.plugin import register_plugin

PLUGIN = "neighbour.v1"
every_mixing = pytest.mark.parametrize("name", [*MIXINGS.names(), PLUGIN], indirect=True)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    """`neighbour.v1` is a mixing of another package (tests/plugin)."""
    with register_plugin(MIXINGS, "neighbour") if request.param == PLUGIN else nullcontext():
        yield request.param


def modules(model: Transformer) -> list[Mixing]:
    return [module for module in model.modules() if isinstance(module, Mixing)]


def build_model(name: str, **options: Any) -> Transformer:
    """A model that mixes at every site, all its parameters random."""
    model = native.model(self_mixing=name, **options)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for module in modules(model):
            for parameter in module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.3)
    return model


def build_pair(name: str) -> tuple[Transformer, Transformer]:
    """A model with fresh mixings and the same model without."""
    torch.manual_seed(0)
    with_mixing = Transformer(native.config(self_mixing=name)).double().eval()
    plain = Transformer(native.config()).double().eval()
    plain.load_state_dict({k: v for k, v in with_mixing.state_dict().items() if ".mixing." not in k})
    return with_mixing, plain


@every_mixing
def test_identity_at_the_start_where_it_says_so(name: str) -> None:
    with_mixing, plain = (native.batch_logits(model) for model in build_pair(name))
    assert torch.allclose(with_mixing, plain, atol=1e-12) == MIXINGS.get(name).identity_at_start


@every_mixing
def test_no_look_at_what_comes_later(name: str) -> None:
    model = build_model(name)
    source, target, _, _ = native.texts()
    before = model(source, target)
    target[:, 3] = (target[:, 3] + 1) % native.TARGET
    assert torch.equal(model(source, target)[:, :3], before[:, :3])


@every_mixing
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_step_by_step_is_the_full_forward(name: str, norm: str) -> None:
    model = build_model(name, norm=norm)
    source, target, source_mask, _ = native.texts()
    expected = model(source, target, source_mask=source_mask)
    state = model.begin(source, source_mask)
    for step in range(target.shape[1]):
        torch.testing.assert_close(model.step(target[:, step], state), expected[:, step], rtol=0, atol=1e-10)


@every_mixing
def test_padding_changes_nothing(name: str) -> None:
    model = build_model(name)
    source, target, _, _ = native.texts()
    alone = model(source[1:2, :4], target[1:2, :2])
    torch.testing.assert_close(native.batch_logits(model)[1:2, :2], alone, rtol=0, atol=1e-10)


@every_mixing
def test_the_gradient_reaches_every_parameter(name: str) -> None:
    model = build_model(name).train()
    source, target, _, _ = native.texts()
    model(source, target).square().sum().backward()
    for module in modules(model):
        if module.heads:
            assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


@every_mixing
def test_training_computes_the_same_as_testing(name: str) -> None:
    """Without the mixing's own noise; training may mix the output projection instead of contexts."""
    options = {} if name != "experts.v1" else {"mixing_options": {"dropout": 0.0}}
    model = build_model(name, **options)
    expected = native.batch_logits(model)
    torch.testing.assert_close(native.batch_logits(model.train()), expected, rtol=0, atol=1e-10)
    with tap_contexts(lambda call, context: context):
        torch.testing.assert_close(native.batch_logits(model), expected, rtol=0, atol=1e-10)


@every_mixing
def test_folding_gives_the_same_model(name: str) -> None:
    model = build_model(name)
    expected = native.batch_logits(model)
    for _, _, _, attention in model.attention_modules():
        assert attention.mixing is not None
        if not attention.mixing.foldable:
            with pytest.raises(NotImplementedError, match="not foldable"):
                attention.mixing.fold(attention.output.weight)
            with pytest.raises(ConfigError, match="input"):
                folded_weights(model)
            return
        attention.output.weight = torch.nn.Parameter(attention.mixing.fold(attention.output.weight.detach()))
        attention.mixing = None
    torch.testing.assert_close(native.batch_logits(model), expected, rtol=0, atol=1e-10)


@every_mixing
def test_heads_can_be_removed_where_it_is_foldable(name: str) -> None:
    checkpoint = checkpoints.small(self_mixing=name)
    checkpoint.model = build_model(name)
    heads = [HeadId(Site.ENCODER_SELF, 0, 1), HeadId(Site.CROSS, 0, 0)]
    plan = plan_removal(checkpoint.attention_sites, heads)
    if not all(module.foldable for module in modules(checkpoint.model)):
        with pytest.raises(ConfigError, match="input"):
            checkpoint.alter_heads(plan, "shrink")
        return
    data = read_input_texts(checkpoint, None, None, sentences=4)
    for removal in (checkpoint.alter_heads(plan, "shrink"), checkpoint.alter_heads(plan, "zero")):
        assert not modules(removal.model)
        assert verify(checkpoint, removal, heads, data).difference < 1e-10


@every_mixing
def test_it_answers_for_itself(name: str) -> None:
    for module in modules(build_model(name)):
        h = module.heads
        assert module.matrix is None or module.matrix.shape == (h, h)
        gates, logits = module.gates(), module.log_a
        assert gates is None or (gates.shape == (h,) and module.foldable)
        assert logits is None or (gates is not None and logits.shape == (h,))
        assert module.experts == 0 or (h > 1 and module.matrix is None and gates is None)


@every_mixing
def test_capture_sees_heads_before_mixing(name: str) -> None:
    model = build_model(name)
    source, target, _, _ = native.texts()
    with capture(model, ("weights", "value", "context")) as calls:
        model(source, target)
    for site in Site:
        call = calls[site, 0]
        heads = call["weights"].shape[1]
        assert torch.equal(call["context"], call["weights"] @ repeat_groups(call["value"], heads))


def test_alpha_is_the_sum_of_heads_with_the_weights_of_its_row() -> None:
    alpha: Any = build_mixing("alpha.v1", heads=3, d_value=5, d_model=7, options={}).double()
    with torch.no_grad():
        alpha.alpha.copy_(torch.randn(3, 3))
    context = torch.randn(2, 3, 4, 5).double()
    output = alpha(context, Queries(torch.randn(2, 4, 7)))
    for i in range(3):
        expected = sum(alpha.alpha[i, j] * context[:, j] for j in range(3))
        torch.testing.assert_close(output[:, i], expected, rtol=0, atol=1e-12)


def test_folding_alpha_block_by_block() -> None:
    """W_O · (A ⊗ I): mhr.md §1.1."""
    alpha: Any = build_mixing("alpha.v1", heads=3, d_value=5, d_model=7, options={})
    with torch.no_grad():
        alpha.alpha.copy_(torch.randn(3, 3))
    w_o = torch.randn(7, 15)
    torch.testing.assert_close(alpha.fold(w_o), w_o @ torch.kron(alpha.alpha.detach(), torch.eye(5)))


def test_names_carry_versions() -> None:
    with pytest.raises(ConfigError, match=r"'alpha'.*'alpha\.v1'"):
        build_mixing("alpha", heads=1, d_value=1, d_model=1, options={})
    with pytest.raises(ConfigError, match="options"):
        build_mixing("alpha.v1", heads=1, d_value=1, d_model=1, options={"experts": 2})
