"""`prune remove --merge-kv`: fewer key/value heads, which compute the same as averaged heads in their places."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers

from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.huggingface.selfcontained import in_plain_class
from headscope.heads import HeadId, Site
from headscope.model.taps import capture
from headscope.pruning.closed_form.compensate import RefittedCopy
from headscope.pruning.closed_form.sequential import sequential_refits
from headscope.pruning.options.shared import Refit
from headscope.pruning.removal import merge_plan
from headscope.pruning.removal.merge_plan import plan_merge
from tests.contracts.architectures import BY_NAME, build, inputs_of, logits
from tests.makers import decoders, wrappers
from tests.makers.shared import Command, succeed
from tests.oracles import closed_form as least_squares
from tests.oracles import speakers
from tests.oracles.merged import average_heads

pytestmark = pytest.mark.slow

LENGTHS = (7, 3, 5)  # padding in the middle
NAMES = ("llama", "mistral", "qwen3", "gemma2", "phi", "gpt_oss")
CASES = [*((name, 1) for name in NAMES), ("wide", 2), ("wide", 4)]
"""Architectures of the contract tests, with a sliding window, norms of keys, biases, sinks; "wide": 8 heads of keys."""


def build_checkpoint(name: str) -> HuggingFaceCheckpoint:
    if name == "wide":
        model = decoders.decoder("qwen2", num_key_value_heads=8).double()
    else:
        model = build(BY_NAME[name], dtype="float32" if name == "gpt_oss" else "float64")
    return wrappers.hugging_face(model)


def scores_by_parity(model: HuggingFaceCheckpoint) -> dict[HeadId, float]:
    """Scores that put groups together which do not stand side by side."""
    return {
        HeadId(site.site, site.layer, head): float((head // (site.heads // site.groups)) % 2 + site.layer % 2 / 2)
        for site in model.attention_sites.order
        for head in range(site.heads)
    }


@pytest.mark.parametrize("by_scores", [False, True], ids=["neighbours", "scores"])
@pytest.mark.parametrize(("name", "count"), CASES)
def test_merged_heads_are_the_averaged_ones(name: str, count: int, by_scores: bool) -> None:
    intact = build_checkpoint(name)
    plan = plan_merge(intact.attention_sites, (count,), scores=scores_by_parity(intact) if by_scores else None)
    sets = [plan.merged[Site.DECODER_SELF, layer] for layer in range(len(plan.merged))]
    expected: Any = average_heads(intact.model, sets, intact.attention_sites.order[0].width)
    merged = intact.alter_heads(plan, "pool").alter_heads(plan, "shrink")
    plain: Any = in_plain_class(merged, plan).model
    assert plain.config.num_key_value_heads == count and not hasattr(plain.config, "narrowed")
    inputs = inputs_of(BY_NAME["llama" if name == "wide" else name], lengths=LENGTHS)
    real = inputs["attention_mask"].bool()
    with capture(expected, ("weights",)) as expected_taps:
        reference = logits(expected, inputs)
    tolerance = (2e-5 if name == "gpt_oss" else 1e-6) * max(1.0, reference.abs().max().item())  # norms are in float32
    for model in (merged.model, plain):
        with capture(model, ("weights",)) as taps:
            assert (logits(model, inputs) - reference)[real].abs().max() <= tolerance
        for site_layer, kept in plan.kept.items():
            weights = expected_taps[site_layer]["weights"][:, list(kept)]
            assert (taps[site_layer]["weights"] - weights).transpose(1, 2)[real].abs().max() <= tolerance


def test_heads_of_one_kind_share_when_there_are_scores() -> None:
    intact = build_checkpoint("wide")
    plan = plan_merge(intact.attention_sites, (2,), scores=scores_by_parity(intact))
    assert plan.merged[Site.DECODER_SELF, 0] == ((0, 2, 4, 6), (1, 3, 5, 7)) == plan.merged[Site.DECODER_SELF, 2]
    assert plan.kept[Site.DECODER_SELF, 0] == (0, 2, 4, 6, 1, 3, 5, 7) and not plan.removed
    neighbours = plan_merge(intact.attention_sites, (4,))
    assert neighbours.merged[Site.DECODER_SELF, 1] == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_output_projections_are_refitted_to_what_the_intact_ones_give() -> None:
    llama, text = speakers.checkpoint("llama"), speakers.corpus("llama", count=17)
    plan = plan_merge(llama.attention_sites, (1,))
    pool = llama.alter_heads(plan, "pool")
    refits = sequential_refits(llama, text, (), Refit(damping=1e-3), merged_copy=pool, residual=False)
    assert [refit.projection.site_layers[0][1] for refit in refits] == list(range(len(llama.layout)))
    intact = least_squares.contexts("llama", llama, text)
    for number, refit in enumerate(refits):
        before = llama.with_model(RefittedCopy.of(pool, refits[:number]).model)
        (site_layer,) = refit.projection.site_layers
        inputs, weight = least_squares.contexts("llama", before, text)[site_layer], refit.projection.weight.numpy()
        targets = intact[site_layer] @ weight.T
        expected, shift = least_squares.refit_to(
            inputs, targets, weight, [], damping=refit.refit.damping, affine=refit.projection.has_bias
        )
        assert np.abs(refit.refit.weight.numpy() - expected).max() < 1e-8
        energy = (targets**2).sum()
        assert refit.error == pytest.approx(((targets - inputs @ expected.T - shift) ** 2).sum() / energy, rel=1e-7)
        assert refit.error_without == pytest.approx(((targets - inputs @ weight.T) ** 2).sum() / energy, rel=1e-7)
        assert refit.error < refit.error_without


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of 8 heads in 4 groups, and a run of `analyze` with scores of them."""
    path = decoders.save_decoder(tmp_path_factory.mktemp("merge") / "whole", tokenizer=decoders.byte_level())
    scores = [f"decoder-self,{layer},{head},{(head // 2) % 2}.0,0.5" for layer in range(3) for head in range(8)]
    (path.parent / "heads.csv").write_text("site,layer,head,full_attention,retrieval\n" + "\n".join(scores) + "\n")
    return path


def test_the_command_writes_a_plain_model_with_a_smaller_cache(
    folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    by = ("--merge-by", folder.parent, "--set", "column=full_attention")
    options = (*by, "--rounds", 1, "--set", "batch=2", "--max-sentences", 4)
    out = succeed(command, "prune", "remove", folder, "--merge-kv", 2, "--out", tmp_path / "small", *options)
    assert "key/value heads merged 4 into 2 in 3 layers" in out and "model with key/value heads averaged" in out
    cache = next(line.split() for line in out.splitlines() if "cache a token" in line)
    assert cache[3:7] == ["1,536", "bytes", "768", "bytes"], "3 layers · 2 · heads · 16 · 4 bytes"
    assert "decoding after 247 tokens" in out and "tokens/s" in out
    auto: Any = transformers.AutoModelForCausalLM
    small = auto.from_pretrained(tmp_path / "small")
    assert type(small).__name__ == "LlamaForCausalLM" and small.config.num_key_value_heads == 2
    record = json.loads((tmp_path / "small" / "pruning.json").read_text(encoding="utf-8"))
    assert record["merged"]["decoder-self"]["1"] == [[0, 2], [1, 3]] and record["removed"] == []
    assert record["kept"]["decoder-self"]["0"] == [0, 1, 4, 5, 2, 3, 6, 7]
    assert record["heads"]["option"] == "--merge-kv" and record["heads"]["sha256"]
    assert {time["tokens"] for time in record["times"]} == {0, 64}


@pytest.mark.parametrize("export", ["self-contained", "masked"])
def test_other_exports_and_a_refit(folder: Path, tmp_path: Path, command: Command, export: str) -> None:
    text = tmp_path / "text.en"
    text.write_text("".join(f"one {word} two and then some more of it\n" for word in "abcdefghijkl"))
    refit = ("--compensate", "least-squares", "--source", text) if export == "self-contained" else ()
    arguments = ("--merge-kv", 1, "--export", export, "--rounds", 0, "--max-sentences", 4, *refit)
    output = succeed(command, "prune", "remove", folder, "--out", tmp_path / "small", "--json", *arguments)
    record = json.loads(output)["record"]
    assert record["verified"]["reloaded"] <= 1e-5 and record["after"]["attention_heads"] == 24
    assert record["after"]["cache"] == record["before"]["cache"] // (4 if export == "self-contained" else 1)
    if refit:
        assert record["compensation"]["sequential"] and len(record["compensation"]["modules"]) == 3
        assert all(module["error"] < module["error_without"] for module in record["compensation"]["modules"])
        assert set(record["compensation"]["performance"]) == {"intact", "removed", "refitted"}


@pytest.mark.parametrize(
    ("last", "expected"),
    [(0.35, (2, 2, 2)), (0.30, (1, 1, 4))],
    ids=["the cost of a head decides, not of a step", "what a step adds decides, not all damage"],
)
def test_steps_are_chosen_by_what_they_add_for_each_head(
    monkeypatch: pytest.MonkeyPatch, last: float, expected: tuple[int, ...]
) -> None:
    damages = ({4: 0.0, 2: 0.2, 1: last}, {4: 0.0, 2: 0.22, 1: 0.9}, {4: 0.0, 2: 0.28, 1: 0.9})
    meter = SimpleNamespace(
        measure=lambda counts: SimpleNamespace(damage=sum(map(dict.__getitem__, damages, counts)))  # layers add up
    )
    monkeypatch.setattr(merge_plan, "DamageMeter", lambda *_, **__: meter)
    monkeypatch.setattr(merge_plan, "plan_merge", lambda sites, counts, scores: counts)
    calls = {layer: [SimpleNamespace(groups=4, heads=8)] for layer in range(3)}
    model: Any = SimpleNamespace(
        attention_sites=SimpleNamespace(calls=calls), alter_heads=lambda plan, how: SimpleNamespace(model=plan)
    )
    text: Any = SimpleNamespace(first=lambda count: None)
    assert merge_plan.measured_counts(model, 2, text) == expected
