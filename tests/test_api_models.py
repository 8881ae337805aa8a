"""Models of the API: ranked, made smaller, captured and gated; those in memory are left as they were."""

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pandas.testing import assert_frame_equal
from torch import Tensor

import headscope as hs
from headscope.errors import ConfigError
from headscope.evaluation.opened import one_batch
from headscope.model.interface import through_attend
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.ranking.rank_run import run_ranking
from tests.makers.removals import remove_heads
from tests.oracles.memory import CHEAP, SOURCES, TARGETS, assert_reopens, build_model, load_model, sentences


@pytest.mark.slow
@pytest.mark.parametrize("by", ["confidence", "gradient", "similarity_cka"])
def test_a_ranking_is_that_of_the_command(
    pair: hs.Model, caption_files: tuple[Path, Path], tmp_path: Path, by: str
) -> None:
    source, target = caption_files
    if by == "similarity_cka":
        study = pair.analyze(SOURCES, target=TARGETS, out=tmp_path / "run", figures=False, **CHEAP)
        ranking, more = pair.rank(by=by, study=study, keep_lowest=True), {"run": tmp_path / "run", "keep_lowest": True}
    else:
        ranking, more = pair.rank(by=by, text=SOURCES, target=TARGETS), {}
    options: dict[str, Any] = {"source": source, "target": target, "by": by, "keep": 50, "device": "cpu", **more}
    choice = run_ranking(RankConfig(checkpoint=hs.assets.trained_model(), out=tmp_path / "out", **options))
    assert ranking.lowest(22) == choice.removed and ranking.highest(50) == choice.kept
    expected = choice.tables["ranking"].sort_values(["site", "layer", "head"])["score"].to_numpy()
    np.testing.assert_array_equal(ranking.scores.sort_values(["site", "layer", "head"])["score"], expected)
    assert ranking.scores["rank"].tolist() == list(range(1, 73)) and len(ranking) == 72
    assert f"by:{by}{'-lowest' if by == 'similarity_cka' else ''}|" in ranking.signature


def test_key_value_groups_go_together() -> None:
    model = load_model("llama")
    ranking = model.rank(by="random")
    assert len(ranking.lowest(6)) == 6
    with pytest.raises(ConfigError, match=r"^4.*8.*groups") as error:
        ranking.lowest(4)
    assert "--" not in str(error.value)


@pytest.mark.slow
def test_a_small_model_computes_what_the_masked_one_does(pair: hs.Model, tmp_path: Path) -> None:
    heads = pair.rank(by="confidence", text=SOURCES, target=TARGETS).lowest(24)
    small = pair.remove(heads, text=SOURCES, target=TARGETS)
    assert isinstance(small, hs.Model) and small.removed == sorted(heads) and len(small.heads) == 48
    with pair.masked(heads):
        torch.testing.assert_close(small(SOURCES, target=TARGETS), pair(SOURCES, target=TARGETS), rtol=1e-4, atol=1e-4)
    assert small.sizes["before"]["attention_heads"] == 72 and small.sizes["after"]["attention_heads"] == 48
    assert small.sizes["after"]["parameters"] == sum(p.numel() for p in set(small.model.parameters()))
    assert small.verified["difference"] <= small.verified["tolerance"]
    removal = small.save(tmp_path / "small")
    remove_heads(hs.assets.trained_model(), tmp_path / "command", ",".join(map(str, heads)))
    assert re.fullmatch(r"<Removal: small: 24 of 72 heads removed .*>", repr(removal))
    again = hs.Removal.open(tmp_path / "small")
    assert again.record == removal.record
    assert_reopens(removal)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "command")]
    assert weights[0] == weights[1] and removal.removed == small.removed
    model = hs.load(tmp_path / "small", device="cpu")
    assert torch.equal(model(SOURCES, target=TARGETS), small(SOURCES, target=TARGETS))
    assert small.analyze(SOURCES, **CHEAP).record["checkpoint"]["digest"] != pair.checkpoint.digest


@pytest.mark.slow
def test_a_text_with_all_that_belongs_to_it(pair: hs.Model, tmp_path: Path) -> None:
    texts = hs.Texts(SOURCES, target=TARGETS)
    assert pair.analyze(texts, **CHEAP).signature == pair.analyze(SOURCES, target=TARGETS, **CHEAP).signature
    with pytest.raises(ConfigError, match=r"Texts.*target"):
        pair.analyze(texts, target=TARGETS)
    (tmp_path / "pairs.tsv").write_text("".join(f"{line}\t{line}\n" for line in sentences()))
    bert = load_model("bert")
    tabs = bert.analyze(hs.Texts(tmp_path / "pairs.tsv", pairs=True), **CHEAP)
    assert_frame_equal(tabs.heads, bert.analyze(sentences(), second=sentences(), **CHEAP).heads)
    assert tabs.record["options"]["pairs"] is True


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that a caller may notice."""
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [part.training for part in model.modules()],
        "hooks": [
            (len(part._forward_hooks), len(part._forward_pre_hooks), len(part._backward_hooks))
            for part in model.modules()
        ],
        "gradients": [(p.requires_grad, p.grad is None) for p in model.parameters()],
        "attention": [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")],
        "forward": [part.__dict__.get("forward") for part in model.modules()],
        "device": {p.device for p in model.parameters()},
        "config": model.config.to_dict(),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "marian"])
def test_a_model_in_memory_is_left_as_it_was(kind: str) -> None:
    model, tokenizer = build_model(kind)
    model.train()
    list(model.modules())[-1].eval()  # a mixture of modes
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    model.register_forward_hook(lambda module, arguments, output: None)
    model.set_attn_implementation("eager")
    wrapper, texts = hs.load(model, tokenizer=tokenizer), sentences()
    target = texts if wrapper.checkpoint.two_sided else None
    before, noise = snapshot(model), torch.get_rng_state()
    assert len(set(before["modes"])) == 2
    wrapper.analyze(texts, target=target, importance="all", shapley_samples=1, skip="lrp", bootstrap=5)
    ranking = wrapper.rank(by="obs-task", text=texts, target=target)  # of moments, with gradients
    small = wrapper.remove(ranking.lowest(len(ranking) // 2))
    for weight in small.model.parameters():  # as training does
        weight.data.zero_()
    wrapper.evaluate(texts, target=target, metrics="perplexity", bootstrap=5)
    with wrapper.capture("weights", "context"), wrapper.gated([str(wrapper.heads[0])]):
        wrapper(texts, target=target)
    if wrapper.checkpoint.two_sided:
        wrapper.translate(texts[:2], max_len_b=3)
    with pytest.raises(ConfigError), wrapper.gated("cross.9.9"):
        pass
    after = snapshot(model)
    assert torch.equal(torch.get_rng_state(), noise)
    torch.testing.assert_close(after.pop("weights"), before.pop("weights"), rtol=0, atol=0)
    assert after == before


@pytest.mark.slow
def test_numbers_of_a_model_in_memory_are_those_of_its_files(tmp_path: Path) -> None:
    model, tokenizer = build_model("bert")
    model.float().save_pretrained(tmp_path / "files")
    tokenizer.save_pretrained(tmp_path / "files")
    model.train()
    on_disk, memory = hs.load(tmp_path / "files", device="cpu"), hs.load(model, tokenizer=tokenizer)
    studies = [m.analyze(sentences(), importance="all", skip="shapley", bootstrap=5) for m in (on_disk, memory)]
    assert_frame_equal(studies[0].heads, studies[1].heads)
    checkpoint = studies[1].record["checkpoint"]
    assert checkpoint["path"] == "BertForMaskedLM in memory" and len(checkpoint["digest"]) == 64
    assert repr(memory).startswith("<Model BertForMaskedLM in memory (huggingface, bert): encoder-self 2 × 3")


def test_the_digest_of_a_model_in_memory_follows_its_weights_and_nothing_else() -> None:
    model, tokenizer = build_model("gpt2")
    digests = [hs.load(model, tokenizer=tokenizer).checkpoint.digest]
    model.train().set_attn_implementation("eager")
    digests.append(hs.load(copy.deepcopy(model)).checkpoint.digest)
    with through_attend(model):
        digests.append(hs.load(model).checkpoint.digest)
    assert len(set(digests)) == 1
    with torch.no_grad():
        model.transformer.wte.weight[3, 2] += 1e-6
    assert hs.load(model).checkpoint.digest != digests[0]


def test_captured_tensors_are_found_by_names(pair: hs.Model) -> None:
    with pair.capture("weights", "context") as heads:
        logits = pair(SOURCES[:3], target=TARGETS[:3])
    weights = heads["cross", 1]["weights"]  # [b h t s]
    assert weights.shape[:3] == (3, 8, logits.shape[1])
    assert torch.equal(heads["cross.1.5"]["weights"], weights[:, 5])
    assert torch.equal(heads[hs.HeadId.parse("cross.1.5")]["context"], heads[hs.Site.CROSS, 1]["context"][:, 5])
    assert repr(heads).startswith("<Captured weights, context of encoder-self.0, ") and len(repr(heads)) < 300
    for wrong, message in {
        5: "'5' is not the name of a head",
        ("cross", 1, 2): "cross.1.2",
        ("cross", 7): "cross.7.*encoder-self.0, ",
        "cross.1.8": "cross.1.*8",
        "cros.1.1": "'cros.1.1' is not the name of a head",
    }.items():
        with pytest.raises(ConfigError, match=message):
            heads[wrong]  # type: ignore[index]
    with pytest.raises(ConfigError, match="no text: give a list"):
        pair(None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weight"), pair.capture("weight"):
        pass


def test_gates_are_names_numbers_or_tensors(pair: hs.Model) -> None:
    def logits(gates: Any = None) -> Tensor:
        if gates is None:
            return pair(SOURCES[:2], target=TARGETS[:2])
        with pair.gated(gates):
            return pair(SOURCES[:2], target=TARGETS[:2])

    intact = logits()
    mask = torch.ones(8)
    mask[5] = 0
    results = [logits(["cross.1.5"]), logits("cross.1.5"), logits({"cross.1.5": 0}), logits({("cross", 1): mask})]
    assert all(torch.equal(x, results[0]) for x in results) and not torch.equal(results[0], intact)
    assert torch.equal(logits({"cross.*.*": 1.0}), intact)
    assert torch.equal(
        logits({"cross.1.*": 0.5, "cross.0.2": 0}), logits({("cross", 1): mask * 0 + 0.5, "cross.0.2": 0.0})
    )
    with pair.masked(["cross.1.5"]):
        assert torch.equal(logits(), results[0])
    gate = torch.ones(8, requires_grad=True)
    with pair.gated({("cross", 1): gate}):
        batch = one_batch(pair.checkpoint, list(zip(SOURCES[:2], TARGETS[:2], strict=True)))
        pair.checkpoint.logits(batch).sum().backward()
    assert gate.grad is not None and gate.grad.abs().min() > 0


@pytest.mark.slow
def test_what_is_measured_under_gates_says_so(pair: hs.Model) -> None:
    plain = pair.analyze(SOURCES, **CHEAP)
    with pair.gated({"encoder-self.0.1": 0.25}), pair.masked("encoder-self.0.3"):
        gated = pair.analyze(SOURCES, **CHEAP)
        assert "|gates:encoder-self.0.1=0.25+encoder-self.0.3=masked|" in gated.signature
        assert "gates:" in str(pair.evaluate(SOURCES, target=TARGETS, metrics="accuracy", bootstrap=5).signature)
        assert "gates:" in pair.rank(by="confidence", text=SOURCES, target=TARGETS).signature
        with pytest.raises(ConfigError, match="block"):
            pair.remove("cross.0.0")
    assert not gated.heads.equals(plain.heads) and "gates" not in plain.signature
    with pair.gated("encoder-self.*.*"):
        assert "|gates:sha1=" in pair.analyze(SOURCES, **CHEAP).signature
    assert pair.analyze(SOURCES, **CHEAP).signature == plain.signature
    masked = pair.analyze(SOURCES, mask=["encoder-self.0.3"], **CHEAP)
    with pair.masked("encoder-self.0.3"):
        assert_frame_equal(pair.analyze(SOURCES, **CHEAP).heads, masked.heads)


def test_gradients_are_there_whatever_surrounds_a_call() -> None:
    wrapper = hs.load(build_model("bert")[0], tokenizer=build_model("bert")[1])
    names: dict[str, Any] = {"only": "positional,gradient", "bootstrap": 5}
    expected = wrapper.analyze(sentences(), **names)
    for around in (torch.no_grad, torch.inference_mode):
        with around():
            study = wrapper.analyze(sentences(), **names)
        assert_frame_equal(study.heads, expected.heads)


def test_weights_that_cannot_be_used_are_refused() -> None:
    model = build_model("bert")[0]
    with torch.inference_mode(), pytest.raises(ConfigError, match=r"inference_mode\(\).*load it outside"):
        hs.load(copy.deepcopy(model))
    with pytest.raises(ConfigError, match=r"weights of this model are on the meta device.*load it outside of"):
        hs.load(copy.deepcopy(model).to("meta"))
