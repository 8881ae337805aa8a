"""Gradient Interaction Modifications: by the authors' package, by detached numbers, and by hand."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from headscope.heads import Site
from headscope.model.mixing.experts import experts_of
from headscope.relevance.backward import Backward, recording
from headscope.relevance.gradient.rules import Rules, tempered_softmax
from headscope.relevance.rulesets import RULE_SETS
from tests.oracles import gim
from tests.oracles import native as models

PACKAGE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data" / "oracles" / "gim" / "heads.json").read_text(encoding="utf-8")
)
HALVES = {
    "eager": Rules(norm="constant", temperature=2.0),
    "sdpa": Rules(norm="constant", weights=0.5, values=0.5, scores=0.5),
}


def whole() -> Rules:
    found = RULE_SETS.get("gim")
    assert isinstance(found, Backward)
    return found.rules


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
    assert whole() == together


def test_gpt2_equals_gradients_through_detached_numbers() -> None:
    model = gim.gpt2("eager")
    ours, logits = relevances(model, whole(), PACKAGE["ids"])
    with gim.changed(model):
        theirs, same = gim.relevances(model, gim.gpt2_outputs(model), PACKAGE["ids"], heads=3)
    torch.testing.assert_close(same, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)


def test_llama_equals_gradients_through_detached_numbers() -> None:
    """Grouped keys and values, rotary positions, norms without mean, gated feed-forward layers."""
    config = LlamaConfig(
        vocab_size=53,
        hidden_size=42,
        intermediate_size=11,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
    )
    torch.manual_seed(5)
    model: Any = LlamaForCausalLM(config).double().eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    ids = [7, 31, 5, 43, 11]
    ours, _ = relevances(model, whole(), ids)
    with gim.changed(model):
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
