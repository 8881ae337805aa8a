"""Relevance by gradients: operation by operation, through whole models, and GIM."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from headscope.heads import HeadId, Site
from headscope.model.mixing.experts import experts_of
from headscope.model.taps import gated
from headscope.relevance.backward import Backward, RecordedPass, recording
from headscope.relevance.gradient.rules import Rules, tempered_softmax
from headscope.relevance.rulesets import RULE_SETS, Relevance
from tests.contracts.architectures import CATALOGUE
from tests.oracles import gim
from tests.oracles import native as models
from tests.oracles import relevance as oracle

NAMES = tuple(name for name, rule_set in RULE_SETS if isinstance(rule_set, Backward))
SITES = {"encoder": Site.ENCODER_SELF, "decoder": Site.DECODER_SELF, "cross": Site.CROSS}
PLACEMENTS = [{"norm": "pre", "activation": "relu", "final_norm": True}, {"norm": "post", "activation": "gelu"}]


def rules(name: str) -> Rules:
    rule_set = RULE_SETS.get(name)
    assert isinstance(rule_set, Backward)
    return rule_set.rules


def record_pass(model: nn.Module, forward: Callable[[], Tensor], *names: str) -> tuple[RecordedPass, Tensor]:
    with recording(model, {name: rules(name) for name in names or NAMES}) as record:
        output = forward()
    return record, output


def compare(relevance: dict[Any, Relevance], tape: oracle.Tape, row: int, length: dict[Site, int]) -> None:
    """One sentence of a batch against a propagated tape."""
    scale = max(float(nodes.context.relevance.abs().sum()) for nodes in tape.heads.values())
    for (side, layer, head), nodes in tape.heads.items():
        site = SITES[side]
        layer_relevance = relevance[site, layer]
        expected = {
            "raw": nodes.context.relevance.sum(),
            "absolute": nodes.context.relevance.abs().sum(),
            "by_query": nodes.context.relevance.sum(dim=-1),
        }
        if tape.own_values:
            expected["value_share"] = nodes.value.relevance.sum()
            expected["qk_share"] = nodes.query.relevance.sum() + nodes.key.relevance.sum()
        for name, number in expected.items():
            value = getattr(layer_relevance, name)[0, row, head]
            if name == "by_query":
                assert (value[length[site] :] == 0).all()
                value = value[: length[site]]
            assert float((value - number).abs().max()) < 1e-9 * scale, (name, side, layer, head)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["pre", "post"])
@pytest.mark.parametrize("name", ["cp", "attnlrp", "epsilon"])
def test_equals_propagation_operation_by_operation(name: str, placement: dict[str, Any]) -> None:
    """Encoder-decoder with biases, layers of different head counts, padding in the middle of the batch."""
    model = models.model(**placement)
    source, target, source_mask, target_mask = models.texts()
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    record, logits = record_pass(model, lambda: model(source, target, **masks), name)
    top, tokens = logits.max(dim=-1)
    rule_set = rules(name)
    for position in (0, 1):
        with torch.enable_grad():
            value = top[:, position].sum()
        relevance = record.relevance(value, rule_set)
        for row in range(3):
            s, t = int(source_mask[row].sum()), int(target_mask[row].sum())
            tape = oracle.Tape("attnlrp" if name == "attnlrp" else "cp", rule_set.epsilon)
            out = oracle.native(model, tape, source[row, :s].tolist(), target[row, :t].tolist())
            torch.testing.assert_close(out.value, logits[row, :t].detach(), rtol=1e-10, atol=1e-10)
            start = torch.zeros_like(out.value)
            index = position, int(tokens[row, position])
            start[index] = out.value[index]
            oracle.propagate(out, start)
            compare(relevance, tape, row, {Site.ENCODER_SELF: s, Site.DECODER_SELF: t, Site.CROSS: t})


def _check(model: Any, forward: Callable[[], Tensor], name: str, tape: oracle.Tape, out: oracle.Node) -> None:
    record, logits = record_pass(model, forward, name)
    torch.testing.assert_close(out.value, logits[0].detach(), rtol=1e-5, atol=1e-5)
    top, tokens = logits.max(dim=-1)
    with torch.enable_grad():
        value = top[:, 2].sum()
    relevance = record.relevance(value, rules(name))
    start = torch.zeros_like(out.value)
    start[2, tokens[0, 2]] = top[0, 2].item()
    oracle.propagate(out, start)
    scale = max(float(nodes.context.relevance.abs().sum()) for nodes in tape.heads.values())
    for (side, layer, head), nodes in tape.heads.items():
        expected = float(nodes.context.relevance.sum())
        got = float(relevance[SITES[side], layer].raw[0, 0, head])
        assert abs(got - expected) < 2e-6 * scale, (side, layer, head)  # transformers computes these norms in float32
        if nodes.query.relevance.any():
            qk_share = relevance[SITES[side], layer].qk_share
            assert qk_share is not None
            qk = float(qk_share[0, 0, head]) / 2
            assert abs(qk - float(nodes.query.relevance.sum())) < 2e-6 * scale


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cp", "attnlrp", "epsilon"])
def test_llama(name: str) -> None:
    """Grouped keys and values, rotary positions, root-mean-square norms, gated feed-forward."""
    model = _sharp(CATALOGUE["llama"].model())
    ids = [7, 31, 5, 43, 11]
    tape = oracle.Tape("attnlrp" if name == "attnlrp" else "cp", rules(name).epsilon)
    out = oracle.llama(model, tape, ids)
    _check(model, lambda: model(input_ids=torch.tensor([ids])).logits, name, tape, out)


@pytest.mark.parametrize("name", ["cp", "attnlrp", "epsilon"])
def test_t5(name: str) -> None:
    """Biases of distances, scores without scaling, gated-gelu, encoder and decoder."""
    sizes: dict[str, Any] = {"d_model": 13, "d_kv": 5, "d_ff": 11, "num_layers": 2, "num_decoder_layers": 3}
    sizes["num_heads"] = 7
    sizes |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False}
    model = _sharp(T5ForConditionalGeneration(T5Config(**sizes, vocab_size=53, feed_forward_proj="gated-gelu")))
    source, target = [7, 31, 5, 43, 11], [0, 17, 23]
    tape = oracle.Tape("attnlrp" if name == "attnlrp" else "cp", rules(name).epsilon)
    out = oracle.t5(model, tape, source, target)
    inputs = {"input_ids": torch.tensor([source]), "decoder_input_ids": torch.tensor([target])}
    _check(model, lambda: model(**inputs).logits, name, tape, out)


def _sharp(model: Any) -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.double().eval()


def test_every_rule_set_reads_the_same_from_one_graph_as_alone() -> None:
    model = models.model(norm="post", activation="gelu")
    source, target, *_ = models.texts()
    together, logits = record_pass(model, lambda: model(source, target))
    with torch.enable_grad():
        value = logits.max(dim=-1).values.sum()
    for name in (*NAMES, *NAMES[::-1]):
        relevance = together.relevance(value, rules(name))
        alone, alone_logits = record_pass(model, lambda: model(source, target), name)
        with torch.enable_grad():
            alone_value = alone_logits.max(dim=-1).values.sum()
        for site_layer, expected in alone.relevance(alone_value, rules(name)).items():
            torch.testing.assert_close(relevance[site_layer].raw, expected.raw, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(relevance[site_layer].qk_share, expected.qk_share, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["pre", "post"])
def test_cp_conserves_relevance_through_the_whole_model(placement: dict[str, Any]) -> None:
    """From a logit to what enters both stacks, attention, norms and feed-forward on the way, without biases."""
    model: Any = models.model(**placement)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    source, target, source_mask, target_mask = models.texts()
    inputs: list[Tensor] = []
    hooks = [
        stack.embeddings.register_forward_hook(lambda _, __, x: inputs.append(x.requires_grad_()))
        for stack in (model.encoder, model.decoder)
    ]
    masks = {"source_mask": source_mask, "target_mask": target_mask}
    record, logits = record_pass(model, lambda: model(source, target, **masks), "cp", "attnlrp")
    for hook in hooks:
        hook.remove()
    top = logits[:, 1].max(dim=-1).values  # [b]
    gaps = {}
    for name in ("cp", "attnlrp"):
        record.active.rules = rules(name)
        gradients = torch.autograd.grad(top.sum(), inputs, retain_graph=True)
        total = sum((x * gradient).sum(dim=(1, 2)) for x, gradient in zip(inputs, gradients, strict=True))
        gaps[name] = float(((total - top) / top).detach().abs().max())
    assert gaps["cp"] < 1e-9 < 1e-3 < gaps["attnlrp"]


def test_a_closed_head_has_no_relevance_and_the_others_keep_theirs_apart() -> None:
    model = models.model(norm="pre")
    source, target, *_ = models.texts()
    with gated(model, [HeadId(Site.CROSS, 2, 0), HeadId(Site.ENCODER_SELF, 1, 1)]):
        record, logits = record_pass(model, lambda: model(source, target), "attnlrp")
    with torch.enable_grad():
        value = logits.max(dim=-1).values.sum()
    relevance = record.relevance(value, rules("attnlrp"))
    assert not relevance[Site.CROSS, 2].raw.any() and not relevance[Site.ENCODER_SELF, 1].absolute[..., 1].any()
    assert relevance[Site.ENCODER_SELF, 1].absolute[..., 0].all() and relevance[Site.CROSS, 1].raw.all()


PACKAGE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "gim" / "heads.json").read_text(encoding="utf-8")
)
HALVES = {
    "eager": Rules(norm="constant", temperature=2.0),
    "sdpa": Rules(norm="constant", weights=0.5, values=0.5, scores=0.5),
}


def relevances(model: Any, rules: Rules, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Relevance of every head [layer h] for the likeliest token after the last one, and the logits [V]."""
    with recording(model, {"gim": rules}) as record:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    with torch.enable_grad():
        relevance = record.relevance(logits.max(), rules)
    layers = [relevance[Site.DECODER_SELF, layer].raw[0, 0] for layer in range(len(relevance))]
    return torch.stack(layers), logits.detach()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_half_is_that_of_the_authors_package(implementation: str) -> None:
    relevance, logits = relevances(gim.gpt2("eager"), HALVES[implementation], PACKAGE["ids"])
    torch.testing.assert_close(logits, torch.tensor(PACKAGE["logits"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    expected = torch.tensor(PACKAGE[implementation], dtype=torch.float64)
    torch.testing.assert_close(relevance, expected, rtol=1e-8, atol=1e-9)
    constant, _ = relevances(gim.gpt2("eager"), Rules(norm="constant"), PACKAGE["ids"])
    assert not torch.allclose(relevance, constant, rtol=0.01)


def test_both_halves_together_are_the_rule_set() -> None:
    together = replace(HALVES["sdpa"], temperature=HALVES["eager"].temperature, product=0.5)
    assert rules("gim") == together


def test_gpt2_equals_gradients_through_detached_numbers() -> None:
    model = gim.gpt2("eager")
    relevance, logits = relevances(model, rules("gim"), PACKAGE["ids"])
    with gim.modify_gradients(model):
        expected, logits_again = gim.relevances(model, gim.gpt2_outputs(model), PACKAGE["ids"], heads=3)
    torch.testing.assert_close(logits_again, logits)
    torch.testing.assert_close(relevance, expected, rtol=1e-9, atol=1e-10)


def test_llama_equals_gradients_through_detached_numbers() -> None:
    """Grouped keys and values, rotary positions, norms without mean, gated feed-forward layers."""
    model = _sharp(CATALOGUE["llama"].model())
    model.set_attn_implementation("eager")
    ids = [7, 31, 5, 43, 11]
    relevance, _ = relevances(model, rules("gim"), ids)
    with gim.modify_gradients(model):
        outputs = [layer.self_attn.o_proj for layer in model.model.layers]
        expected, _ = gim.relevances(model, outputs, ids, heads=6)
    gap = (relevance - expected).abs().max()
    assert gap < 2e-6 * expected.abs().max()  # transformers' norms are in float32


def test_published_softmax() -> None:
    x, g = torch.tensor([2.0, 0, 0]).double(), torch.tensor([1.0, 0, 0]).double()
    for temperature, first in ((1, 0.16764), (2, 0.24421)):
        gradient = tempered_softmax(g, x, temperature=temperature, dim=-1)
        torch.testing.assert_close(gradient, torch.tensor([first, -first / 2, -first / 2]).double(), atol=6e-6, rtol=0)
    soft = torch.softmax(x.requires_grad_(), dim=-1)
    (expected,) = torch.autograd.grad(soft, x, g)
    torch.testing.assert_close(tempered_softmax(g, x.detach(), temperature=1, dim=-1), expected)


# Mixtures of attentive experts: their factors are constants of the rule sets, variables of the ordinary gradient.


def test_factors_of_experts_are_constants() -> None:
    """Relevance at a head is its factor times that at the mixed head, which the projection gives."""
    model = models.model(self_mixing="experts.v1", norm="pre")
    source, target, *_ = models.texts()
    rule_sets = {name: rule_set.rules for name, rule_set in RULE_SETS if isinstance(rule_set, Backward)}
    inputs = []
    module: Any = model.get_submodule("decoder.layers.2.cross_attention")
    hook = module.output.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    assert experts_of(model)
    with recording(model, rule_sets) as record:
        logits = model(source, target)
    hook.remove()
    with torch.enable_grad():
        value = logits[:, 4].max(dim=-1).values.sum()
    heads = module.heads
    for name in ("cp", "attnlrp"):
        relevance = record.relevance(value, rule_sets[name])
        assert all(layer_relevance.raw.isfinite().all() for layer_relevance in relevance.values())
        record.active.rules = rule_sets[name]
        (gradient,) = torch.autograd.grad(value, inputs, retain_graph=True)
        expected = (inputs[0] * gradient).detach().unflatten(-1, (heads, -1)).sum(dim=(1, 3))
        site_layer = next(site_layer for site_layer in relevance if site_layer[0] == "cross" and site_layer[1] == 2)
        torch.testing.assert_close(relevance[site_layer].raw[0], expected, rtol=1e-10, atol=1e-12)
