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

NAMES = tuple(name for name, each in RULE_SETS if isinstance(each, Backward))
SITES = {"encoder": Site.ENCODER_SELF, "decoder": Site.DECODER_SELF, "cross": Site.CROSS}
PLACEMENTS = [{"norm": "pre", "activation": "relu", "final_norm": True}, {"norm": "post", "activation": "gelu"}]


def rules(name: str) -> Rules:
    found = RULE_SETS.get(name)
    assert isinstance(found, Backward)
    return found.rules


def recorded(model: nn.Module, forward: Callable[[], Tensor], *names: str) -> tuple[RecordedPass, Tensor]:
    with recording(model, {name: rules(name) for name in names or NAMES}) as its:
        output = forward()
    return its, output


def compare(found: dict[Any, Relevance], tape: oracle.Tape, row: int, length: dict[Site, int]) -> None:
    """One sentence of a batch against a propagated tape."""
    scale = max(float(its.context.relevance.abs().sum()) for its in tape.heads.values())
    for (side, layer, head), its in tape.heads.items():
        site = SITES[side]
        place = found[site, layer]
        expected = {
            "raw": its.context.relevance.sum(),
            "absolute": its.context.relevance.abs().sum(),
            "by_query": its.context.relevance.sum(dim=-1),
        }
        if tape.own_values:
            expected["value_share"] = its.value.relevance.sum()
            expected["qk_share"] = its.query.relevance.sum() + its.key.relevance.sum()
        for name, number in expected.items():
            got = getattr(place, name)[0, row, head]
            if name == "by_query":
                assert (got[length[site] :] == 0).all()
                got = got[: length[site]]
            assert float((got - number).abs().max()) < 1e-9 * scale, (name, side, layer, head)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["pre", "post"])
@pytest.mark.parametrize("name", ["cp", "attnlrp", "epsilon"])
def test_equals_propagation_operation_by_operation(name: str, placement: dict[str, Any]) -> None:
    """Encoder-decoder with biases, layers of different head counts, padding in the middle of the batch."""
    made = models.model(**placement)
    source, target, source_mask, target_mask = models.texts()
    its, logits = recorded(made, lambda: made(source, target, source_mask=source_mask, target_mask=target_mask), name)
    top, chosen = logits.max(dim=-1)
    its_rules = rules(name)
    for position in (0, 1):
        with torch.enable_grad():
            value = top[:, position].sum()
        found = its.relevance(value, its_rules)
        for row in range(3):
            s, t = int(source_mask[row].sum()), int(target_mask[row].sum())
            tape = oracle.Tape("attnlrp" if name == "attnlrp" else "cp", its_rules.epsilon)
            out = oracle.native(made, tape, source[row, :s].tolist(), target[row, :t].tolist())
            torch.testing.assert_close(out.value, logits[row, :t].detach(), rtol=1e-10, atol=1e-10)
            start = torch.zeros_like(out.value)
            where = position, int(chosen[row, position])
            start[where] = out.value[where]
            oracle.propagate(out, start)
            compare(found, tape, row, {Site.ENCODER_SELF: s, Site.DECODER_SELF: t, Site.CROSS: t})


def _check(model: Any, forward: Callable[[], Tensor], name: str, tape: oracle.Tape, out: oracle.Node) -> None:
    its, logits = recorded(model, forward, name)
    torch.testing.assert_close(out.value, logits[0].detach(), rtol=1e-5, atol=1e-5)
    top, chosen = logits.max(dim=-1)
    with torch.enable_grad():
        value = top[:, 2].sum()
    found = its.relevance(value, rules(name))
    start = torch.zeros_like(out.value)
    start[2, chosen[0, 2]] = top[0, 2].item()
    oracle.propagate(out, start)
    scale = max(float(each.context.relevance.abs().sum()) for each in tape.heads.values())
    for (side, layer, head), each in tape.heads.items():
        expected = float(each.context.relevance.sum())
        got = float(found[SITES[side], layer].raw[0, 0, head])
        assert abs(got - expected) < 2e-6 * scale, (side, layer, head)  # transformers computes these norms in float32
        if each.query.relevance.any():
            qk_share = found[SITES[side], layer].qk_share
            assert qk_share is not None
            qk = float(qk_share[0, 0, head]) / 2
            assert abs(qk - float(each.query.relevance.sum())) < 2e-6 * scale


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
    made = models.model(norm="post", activation="gelu")
    source, target, *_ = models.texts()
    together, logits = recorded(made, lambda: made(source, target))
    with torch.enable_grad():
        value = logits.max(dim=-1).values.sum()
    for name in (*NAMES, *NAMES[::-1]):
        found = together.relevance(value, rules(name))
        alone, its_logits = recorded(made, lambda: made(source, target), name)
        with torch.enable_grad():
            its_value = its_logits.max(dim=-1).values.sum()
        for place, expected in alone.relevance(its_value, rules(name)).items():
            torch.testing.assert_close(found[place].raw, expected.raw, rtol=1e-12, atol=1e-13)
            torch.testing.assert_close(found[place].qk_share, expected.qk_share, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=["pre", "post"])
def test_cp_conserves_relevance_through_the_whole_model(placement: dict[str, Any]) -> None:
    """From a logit to what enters both stacks, attention, norms and feed-forward on the way, without biases."""
    made: Any = models.model(**placement)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    source, target, source_mask, target_mask = models.texts()
    entered: list[Tensor] = []
    hooks = [
        stack.embeddings.register_forward_hook(lambda _, __, x: entered.append(x.requires_grad_()))
        for stack in (made.encoder, made.decoder)
    ]
    its, logits = recorded(
        made, lambda: made(source, target, source_mask=source_mask, target_mask=target_mask), "cp", "attnlrp"
    )
    for hook in hooks:
        hook.remove()
    top = logits[:, 1].max(dim=-1).values  # [b]
    gaps = {}
    for name in ("cp", "attnlrp"):
        its.active.rules = rules(name)
        gradients = torch.autograd.grad(top.sum(), entered, retain_graph=True)
        total = sum((x * gradient).sum(dim=(1, 2)) for x, gradient in zip(entered, gradients, strict=True))
        gaps[name] = float(((total - top) / top).detach().abs().max())
    assert gaps["cp"] < 1e-9 < 1e-3 < gaps["attnlrp"]


def test_a_closed_head_has_no_relevance_and_the_others_keep_theirs_apart() -> None:
    made = models.model(norm="pre")
    source, target, *_ = models.texts()
    with gated(made, [HeadId(Site.CROSS, 2, 0), HeadId(Site.ENCODER_SELF, 1, 1)]):
        its, logits = recorded(made, lambda: made(source, target), "attnlrp")
    with torch.enable_grad():
        value = logits.max(dim=-1).values.sum()
    found = its.relevance(value, rules("attnlrp"))
    assert not found[Site.CROSS, 2].raw.any() and not found[Site.ENCODER_SELF, 1].absolute[..., 1].any()
    assert found[Site.ENCODER_SELF, 1].absolute[..., 0].all() and found[Site.CROSS, 1].raw.all()


PACKAGE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "gim" / "heads.json").read_text(encoding="utf-8")
)
HALVES = {
    "eager": Rules(norm="constant", temperature=2.0),
    "sdpa": Rules(norm="constant", weights=0.5, values=0.5, scores=0.5),
}


def relevances(model: Any, rules: Rules, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Relevance of every head [layer h] for the likeliest token after the last one, and the logits [V]."""
    with recording(model, {"gim": rules}) as recorded:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    with torch.enable_grad():
        found = recorded.relevance(logits.max(), rules)
    return torch.stack([found[Site.DECODER_SELF, layer].raw[0, 0] for layer in range(len(found))]), logits.detach()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_either_half_is_that_of_the_authors_package(implementation: str) -> None:
    ours, logits = relevances(gim.gpt2("eager"), HALVES[implementation], PACKAGE["ids"])
    torch.testing.assert_close(logits, torch.tensor(PACKAGE["logits"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    theirs = torch.tensor(PACKAGE[implementation], dtype=torch.float64)
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9)
    assert not torch.allclose(ours, relevances(gim.gpt2("eager"), Rules(norm="constant"), PACKAGE["ids"])[0], rtol=0.01)


def test_both_halves_together_are_the_rule_set() -> None:
    together = replace(HALVES["sdpa"], temperature=HALVES["eager"].temperature, product=0.5)
    assert rules("gim") == together


def test_gpt2_equals_gradients_through_detached_numbers() -> None:
    model = gim.gpt2("eager")
    ours, logits = relevances(model, rules("gim"), PACKAGE["ids"])
    with gim.modify_gradients(model):
        theirs, same = gim.relevances(model, gim.gpt2_outputs(model), PACKAGE["ids"], heads=3)
    torch.testing.assert_close(same, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_llama_equals_gradients_through_detached_numbers() -> None:
    """Grouped keys and values, rotary positions, norms without mean, gated feed-forward layers."""
    model = _sharp(CATALOGUE["llama"].model())
    model.set_attn_implementation("eager")
    ids = [7, 31, 5, 43, 11]
    ours, _ = relevances(model, rules("gim"), ids)
    with gim.modify_gradients(model):
        outputs = [layer.self_attn.o_proj for layer in model.model.layers]
        theirs, _ = gim.relevances(model, outputs, ids, heads=6)
    assert float((ours - theirs).abs().max()) < 2e-6 * float(theirs.abs().max())  # transformers' norms are in float32


def test_published_softmax() -> None:
    x, g = torch.tensor([2.0, 0, 0]).double(), torch.tensor([1.0, 0, 0]).double()
    for temperature, first in ((1, 0.16764), (2, 0.24421)):
        gradient = tempered_softmax(g, x, temperature=temperature, dim=-1)
        torch.testing.assert_close(gradient, torch.tensor([first, -first / 2, -first / 2]).double(), atol=6e-6, rtol=0)
    soft = torch.softmax(x.requires_grad_(), dim=-1)
    (own,) = torch.autograd.grad(soft, x, g)
    torch.testing.assert_close(tempered_softmax(g, x.detach(), temperature=1, dim=-1), own)


# Mixtures of attentive experts: their factors are constants of the rule sets, variables of the ordinary gradient.


def test_factors_of_experts_are_constants() -> None:
    """Relevance at a head is its factor times that at the mixed head, which the projection gives."""
    made = models.model(self_mixing="experts.v1", norm="pre")
    source, target, *_ = models.texts()
    rule_sets = {name: each.rules for name, each in RULE_SETS if isinstance(each, Backward)}
    seen = []
    module: Any = made.get_submodule("decoder.layers.2.cross_attention")
    hook = module.output.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    assert experts_of(made)
    with recording(made, rule_sets) as recorded:
        logits = made(source, target)
    hook.remove()
    with torch.enable_grad():
        value = logits[:, 4].max(dim=-1).values.sum()
    mixed = module.heads
    for name in ("cp", "attnlrp"):
        found = recorded.relevance(value, rule_sets[name])
        assert all(each.raw.isfinite().all() for each in found.values())
        recorded.active.rules = rule_sets[name]
        (gradient,) = torch.autograd.grad(value, seen, retain_graph=True)
        expected = (seen[0] * gradient).detach().unflatten(-1, (mixed, -1)).sum(dim=(1, 3))
        place = next(place for place in found if place[0] == "cross" and place[1] == 2)
        torch.testing.assert_close(found[place].raw[0], expected, rtol=1e-10, atol=1e-12)
