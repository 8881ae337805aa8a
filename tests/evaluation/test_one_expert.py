"""One expert at test time, as `evaluate` and `translate` have it, against a plain model without the head it lacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import headscope as hs
from headscope.formats.native import NATIVE
from headscope.model.mixing.experts import Experts, experts_of, one_expert
from tests.makers.experts import disturbed
from tests.makers.sweeps import evaluated, made_words
from tests.oracles import checkpoints, native

pytestmark = pytest.mark.slow
MIXED: dict[str, Any] = {"self_mixing": "experts.v1", "cross_mixing": "experts.v1"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The same weights as a plain model, as experts without gates and with gates that differ."""
    folder = tmp_path_factory.mktemp("experts")
    plain = checkpoints.small()
    words = made_words(folder, plain)
    found = {"plain": words}
    ways: dict[str, dict[str, Any]] = {"uniform": {"mixing_options": {"uniform": True}}, "gated": {}}
    for name, options in ways.items():
        its = checkpoints.small()
        its.model = native.model(**MIXED, **options).to(plain.dtype)
        missing = its.model.load_state_dict(plain.model.state_dict(), strict=False)
        assert not missing.unexpected_keys
        disturbed(its.model)
        its.model.load_state_dict(plain.model.state_dict(), strict=False)
        NATIVE.save(its, folder / name)
        found[name] = {**words, "checkpoint": str(folder / name)}
    return found


def without_a_head(words: dict[str, Any], head: int, folder: Path) -> dict[str, Any]:
    """What evaluate says of the plain model with this head off in every layer and the others scaled by h / (h − 1)."""
    scaled: Any = hs.load(words["checkpoint"]).checkpoint
    with torch.no_grad():
        for _, _, _, module in scaled.model.attention_modules():
            if module.heads > 1:
                module.output.weight.mul_(module.heads / (module.heads - 1))
    NATIVE.save(scaled, folder / "scaled")
    mask = ",".join(f"{site}.{layer}.{head}" for (site, layer), heads in scaled.layout.items() if heads > head)
    return evaluated({**words, "checkpoint": str(folder / "scaled")}, mask=mask)


def test_an_expert_is_the_model_without_its_head(models: dict[str, Any], tmp_path: Path) -> None:
    expected = without_a_head(models["plain"], 1, tmp_path)
    for name in ("uniform", "gated"):
        assert evaluated(models[name], expert="1") == pytest.approx(expected, rel=1e-5)
    assert evaluated(models["uniform"])["perplexity"] == pytest.approx(evaluated(models["plain"])["perplexity"])


def test_a_drawn_expert_follows_from_the_seed_and_is_the_same_for_all_sentences(models: dict[str, Any]) -> None:
    found = [evaluated(models["uniform"], expert="random", seed=seed)["perplexity"] for seed in (1, 1, 2)]
    assert found[0] == found[1] != found[2]
    model = hs.load(models["uniform"]["checkpoint"]).checkpoint.model
    with one_expert(model, "random", seed=1):
        modes = [mixture.mode for mixture in experts_of(model)]
    assert all(isinstance(mode, int) for mode in modes) and len(set(modes)) > 1
    assert {mixture.mode for mixture in experts_of(model)} == {"soft"}


def test_the_top_expert_has_the_largest_responsibility(models: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    soft, top = (evaluated(models["gated"], expert=expert)["perplexity"] for expert in (None, "top"))
    assert soft != top
    real = Experts.log_gates
    monkeypatch.setattr(Experts, "log_gates", lambda self, queries: (real(self, queries) * 1e9).log_softmax(-1))
    sharp = evaluated(models["gated"])["perplexity"]
    assert sharp == pytest.approx(top, rel=1e-5)
