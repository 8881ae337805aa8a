"""Mixtures of attentive experts: their factors are constants of the rule sets, variables of the ordinary gradient."""

from __future__ import annotations

from typing import Any

import torch

from headscope.model.mixing.experts import experts_of
from headscope.relevance.backward import Backward, recording
from headscope.relevance.rulesets import RULE_SETS
from tests.oracles import native as models


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
