"""The public API: the same numbers and files as the commands, texts in memory, models left as they were."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from oracles import speakers
from pandas.testing import assert_frame_equal
from torch import Tensor

import headscope as hs
from headscope.api.options import AnalyzeMore, EvaluateMore, python_words
from headscope.config import AnalyzeConfig, AnalyzeOptions, EvaluateConfig, EvaluateOptions
from headscope.each_head import run_each_head
from headscope.errors import CheckpointError, ConfigError, DataError, HeadscopeError, OutputError
from headscope.evaluate import run_evaluation
from headscope.formats.base import TranslateOptions, open_checkpoint
from headscope.model.interface import through_attend
from headscope.pruning.rank_run import RankConfig, run_ranking
from headscope.pruning.remove import RemoveConfig, run_removal
from headscope.runs import run_analysis
from headscope.translate import translate_lines

EN, DE = hs.assets.captions("en"), hs.assets.captions("de")
N = 13
SOURCES, TARGETS = (path.read_text(encoding="utf-8").splitlines()[:N] for path in (EN, DE))
CHEAP: dict[str, Any] = {"only": ("confidence", "positional", "similarity"), "bootstrap": 17}


@pytest.fixture(scope="module")
def pair() -> hs.Model:
    """The small translation model that ships."""
    return hs.load(hs.assets.trained(), device="cpu")


@pytest.fixture
def texts(tmp_path: Path) -> tuple[Path, Path]:
    """The first captions as files."""
    paths = tmp_path / "text.en", tmp_path / "text.de"
    for path, lines in zip(paths, (SOURCES, TARGETS), strict=True):
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def in_memory(kind: str) -> tuple[Any, Any]:
    """A random transformers model of its own, and a tokenizer."""
    made = speakers.checkpoint(kind)
    return copy.deepcopy(made.model), made.tokenizer  # type: ignore[attr-defined]


def sentences() -> list[str]:
    """Sentences of the tiny tokenizer's words."""
    words = speakers.PIECES[4:]
    return [" ".join(words[(3 * i + j) % len(words)] for j in range(3 + i)) for i in range(5)]


# What is imported, and what is there.


def test_importing_headscope_is_light_and_lazy(python: Callable[..., str]) -> None:
    code = """
import sys, headscope as hs
assert {"load", "analyze", "prune", "train", "evaluate", "plot", "Model", "Study"} <= set(dir(hs))
hs.HeadId.parse("cross.0.1"), hs.HeadscopeError, hs.assets.trained()
print([name for name in ("torch", "numpy", "pandas", "transformers", "matplotlib", "rich") if name in sys.modules])
"""
    assert python("-c", code).strip() == "[]"


def test_every_public_name_is_there_and_an_unknown_one_is_not() -> None:
    assert hs.load and all(getattr(hs, name) is not None for name in hs.__all__)
    assert all(isinstance(getattr(hs, name), types.FunctionType) for name in ("analyze", "evaluate", "plot", "train"))
    with pytest.raises(AttributeError, match="no attribute 'anlyze'"):
        hs.anlyze  # noqa: B018


@pytest.mark.parametrize(
    ("function", "more", "options", "elsewhere"),
    [
        (hs.Model.analyze, AnalyzeMore, AnalyzeOptions, set()),
        (hs.Model.evaluate, EvaluateMore, EvaluateOptions, {"text", "each_head", "heads"}),
    ],
)
def test_methods_take_every_option_of_their_config(function: Any, more: Any, options: Any, elsewhere: set[str]) -> None:
    own = set(function.__wrapped__.__annotations__)
    names = {each.name for each in fields(options)}
    assert set(more.__annotations__) | (own & names) | elsewhere == names
    assert not set(more.__annotations__) & own


def test_commands_take_what_methods_take() -> None:
    for name in ("analyze", "evaluate"):
        method = dict(getattr(hs.Model, name).__wrapped__.__annotations__)
        function = dict(getattr(hs, name).__annotations__)
        del function["model"]
        assert function == method


# Analyses.


def test_a_study_has_the_numbers_and_the_files_of_the_command(
    pair: hs.Model, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    shared = {**CHEAP, "detail": True, "mask": "cross.1.2"}
    run_analysis(
        AnalyzeConfig(
            hs.assets.trained(), tmp_path / "command", source=texts[0], target=texts[1], device="cpu", **shared
        )
    )
    study = pair.analyze(texts[0], target=texts[1], **shared)
    assert study.save(tmp_path / "study") == tmp_path / "study"
    files = {path.relative_to(tmp_path / "study") for path in (tmp_path / "study").rglob("*") if path.is_file()}
    assert Path("figures/heads.png") in files and Path("detail/confidence.npz") in files
    assert files == {path.relative_to(tmp_path / "command") for path in (tmp_path / "command").rglob("*.*")}
    for name in files - {Path("run.json")}:
        assert (tmp_path / "study" / name).read_bytes() == (tmp_path / "command" / name).read_bytes(), name
    mine, theirs = (json.loads((tmp_path / name / "run.json").read_text()) for name in ("study", "command"))
    for name in set(theirs) - {"command", "seconds", "options"}:
        assert mine[name] == theirs[name], name
    assert mine["options"].items() <= theirs["options"].items()
    assert study.signature == theirs["signature"] and study.record["complete"]


@pytest.mark.parametrize("kind", ["list", "pairs", "tuple", "tuple of paths", "generator", "gz"])
def test_texts_may_be_files_lists_and_pairs(
    pair: hs.Model, texts: tuple[Path, Path], tmp_path: Path, kind: str
) -> None:
    expected = pair.analyze(str(texts[0]), target=texts[1], **CHEAP)
    given: dict[str, tuple[Any, ...]] = {
        "list": (SOURCES, TARGETS),
        "pairs": (list(zip(SOURCES, TARGETS, strict=True)),),
        "tuple": ((SOURCES, TARGETS),),
        "tuple of paths": ((texts[0], str(texts[1])),),
        "generator": ((line for line in SOURCES), texts[1]),
        "gz": (texts[0], pd.Series(TARGETS)),
    }
    text, *target = given[kind]
    study = pair.analyze(text, **CHEAP, **({"target": target[0]} if target else {}))
    assert_frame_equal(study.heads, expected.heads)
    assert study.signature == expected.signature


def test_sentences_of_a_list_may_end_in_a_line_feed(pair: hs.Model) -> None:
    plain = pair.analyze(SOURCES[:3], **CHEAP)
    assert pair.analyze([f"{line}\n" for line in SOURCES[:3]], **CHEAP).signature == plain.signature


def test_parses_of_a_file_may_belong_to_a_list(tmp_path: Path) -> None:
    parses, text = hs.assets.sample("conllu"), hs.assets.sample("en").read_text(encoding="utf-8").splitlines()
    model = hs.load(hs.assets.trained())
    options = {"only": "syntactic", "max_sentences": 20, "min_instances": 2, "bootstrap": 10}
    studies = [model.analyze(given, parse=parses, **options) for given in (text, None)]
    assert_frame_equal(studies[0].table("syntactic"), studies[1].table("syntactic"))


def test_tables_arrays_and_labels_of_a_study(pair: hs.Model) -> None:
    study = pair.analyze(SOURCES, target=TARGETS, **CHEAP)
    assert study.tables == ["heads", "positional"] and study.table("heads") is study.heads
    assert len(study.heads) == 72 and study.sentences == N and study.complete and not study.left_out
    assert study.array("similarity/cross/1/cka").shape == (8, 8)
    assert "similarity/encoder-self/0/cosine_low" in study.arrays
    assert all(isinstance(head, hs.HeadId) for head in study.labels)
    assert "72 heads" in repr(study)
    page = study._repr_html_()
    assert "60 more heads" in page and "confidence" in page and "confidence_low" not in page
    assert study.signature.replace("|", "")[:20] in page.replace("|", "")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("heads", {"measure": ["confidence", "offset_share"], "sort": True}),
        ("heads", {"measure": "confidence"}),
        ("functions", {}),
        ("positional", {}),
        ("similarity", {"measure": "cka"}),
    ],
)
def test_a_figure_of_a_study_is_that_of_its_files(
    pair: hs.Model, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    study = pair.analyze(SOURCES, target=TARGETS, out=tmp_path / "run", figures=False, **CHEAP)
    figure = hs.plot(study, name, out=tmp_path / "a.svg", **options)
    hs.plot(tmp_path / "run", name, out=tmp_path / "b.svg", **options)
    assert figure.get_size_inches().min() > 0
    assert (tmp_path / "a.svg").read_bytes().replace(b"a.svg", b"") == (tmp_path / "b.svg").read_bytes()


def test_two_studies_are_compared(pair: hs.Model, tmp_path: Path) -> None:
    first = pair.analyze(SOURCES[:5], out=tmp_path / "first", figures=False, **CHEAP)
    second = pair.analyze(SOURCES[5:], **CHEAP)
    assert hs.plot([first, second], "compare", measure="offset_share").axes
    assert hs.plot([tmp_path / "first", second], "compare").axes


def test_nothing_is_written_unless_a_call_says_so(
    pair: hs.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    study = pair.analyze(SOURCES, target=TARGETS, **CHEAP)
    study.plot("heads")
    pair.remove(pair.rank(by="confidence", study=study).lowest(3)).translate(SOURCES[:1])
    pair.evaluate(SOURCES, target=TARGETS, metrics="perplexity")
    assert not list(tmp_path.iterdir())
    assert capfd.readouterr() == ("", "")


def test_convenience_functions_are_the_methods(pair: hs.Model) -> None:
    assert_frame_equal(
        hs.analyze(hs.assets.trained(), SOURCES, **CHEAP).heads, hs.analyze(pair, SOURCES, **CHEAP).heads
    )
    scores = hs.evaluate(hs.assets.trained(), SOURCES, target=TARGETS, metrics="perplexity", bootstrap=10)
    assert scores["perplexity"] == pair.evaluate((SOURCES, TARGETS), metrics=["perplexity"], bootstrap=10)["perplexity"]


# Ranking and removal.


@pytest.mark.parametrize("by", ["confidence", "entropy", "gradient", "magnitude", "random", "similarity_cka"])
def test_a_ranking_is_that_of_the_command(pair: hs.Model, texts: tuple[Path, Path], tmp_path: Path, by: str) -> None:
    if by == "similarity_cka":
        study = pair.analyze(SOURCES, target=TARGETS, out=tmp_path / "run", figures=False, **CHEAP)
        ranking, more = pair.rank(by=by, study=study), {"run": tmp_path / "run"}
    else:
        ranking, more = pair.rank(by=by, text=SOURCES, target=TARGETS), {}
    choice = run_ranking(
        RankConfig(
            checkpoint=hs.assets.trained(),
            out=tmp_path / "out",
            source=texts[0],
            target=texts[1],
            device="cpu",
            by=by,
            keep=50,
            **more,  # type: ignore[arg-type]
        )
    )
    assert ranking.lowest(22) == choice.removed and ranking.highest(50) == choice.kept
    expected = choice.ranking.sort_values(["site", "layer", "head"])["score"].to_numpy()
    np.testing.assert_array_equal(ranking.scores.sort_values(["site", "layer", "head"])["score"], expected)
    assert ranking.scores["rank"].tolist() == list(range(1, 73)) and len(ranking) == 72
    assert f"by:{by}|" in ranking.signature


def test_rankings_by_layer_with_sites_protection_and_the_other_way_round(pair: hs.Model) -> None:
    ranking = pair.rank(by="magnitude", sites="cross, encoder-self", protect=["cross.0.*"], lowest=True)
    plain = pair.rank(by="magnitude", sites=["cross", "encoder-self"], protect="cross.0.*")
    assert ranking.lowest(5) != plain.lowest(5)
    assert {head.site.value for head in plain.lowest(40)} == {"cross", "encoder-self"}
    assert not {str(head) for head in plain.lowest(40)} & {f"cross.0.{head}" for head in range(8)}
    assert {str(head) for head in plain.highest(10)} >= {f"cross.0.{head}" for head in range(8)}
    counts = pd.Series([(head.site, head.layer) for head in plain.lowest(10, per_layer=True)]).value_counts()
    assert set(counts) == {2}
    with pytest.raises(ConfigError, match="41 heads cannot go; there are 40 that may"):
        plain.lowest(41)


def test_key_value_groups_go_together() -> None:
    model = hs.load(*in_memory("llama")[:1], tokenizer=in_memory("llama")[1])
    ranking = model.rank(by="random")
    assert len(ranking.lowest(6)) == 6
    with pytest.raises(ConfigError, match=r"^4 heads cannot go: keep 8 is not whole groups") as caught:
        ranking.lowest(4)
    assert "--" not in str(caught.value)


def test_a_small_model_computes_what_the_masked_one_does(pair: hs.Model, tmp_path: Path) -> None:
    heads = pair.rank(by="confidence", text=SOURCES, target=TARGETS).lowest(24)
    small = pair.remove(heads, text=SOURCES, target=TARGETS)
    assert isinstance(small, hs.Model) and small.removed == tuple(sorted(heads)) and len(small.heads) == 48
    with pair.masked(heads):
        torch.testing.assert_close(small(SOURCES, target=TARGETS), pair(SOURCES, target=TARGETS), rtol=1e-4, atol=1e-4)
    assert small.sizes["before"]["attention_heads"] == 72 and small.sizes["after"]["attention_heads"] == 48
    assert small.sizes["after"]["parameters"] == sum(each.numel() for each in set(small.model.parameters()))
    assert small.verified.difference <= small.verified.tolerance
    saved = small.save(tmp_path / "small")
    run_removal(
        RemoveConfig(
            checkpoint=hs.assets.trained(),
            out=tmp_path / "command",
            heads=",".join(map(str, heads)),
            rounds=0,
            device="cpu",
        )
    )
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("small", "command")]
    assert weights[0] == weights[1] and saved.removal.removed == small.removed
    again = hs.load(tmp_path / "small", device="cpu")
    assert torch.equal(again(SOURCES, target=TARGETS), small(SOURCES, target=TARGETS))
    assert small.analyze(SOURCES, **CHEAP).record["checkpoint"]["digest"] != pair.checkpoint.digest


def test_a_small_transformers_model_can_be_trained_on_and_saved(tmp_path: Path) -> None:
    model, tokenizer = in_memory("bert")
    opened = hs.load(model, tokenizer=tokenizer)
    small = opened.remove(["encoder-self.0.1", "encoder-self.1.0", "encoder-self.1.2"])
    assert type(small.model).__name__ == "BertForMaskedLM" and small.model is not model
    before = small.checkpoint.digest
    with torch.no_grad():
        for parameter in small.model.parameters():
            parameter.mul_(1.01)
    assert small.checkpoint.digest != before
    found = small.save(tmp_path / "small", export="self-contained")
    assert found.format == "huggingface" and found.export == "self-contained"
    again = hs.load(tmp_path / "small", dtype="float64", device="cpu")
    torch.testing.assert_close(again(sentences()), small(sentences()), rtol=0, atol=1e-12)


def test_the_plain_class_is_written_where_it_can_say_so(tmp_path: Path) -> None:
    config = in_memory("t5")[0].config
    config.num_layers = config.num_decoder_layers
    model, tokenizer = transformers.T5ForConditionalGeneration(config), in_memory("t5")[1]
    small = hs.load(model, tokenizer=tokenizer).remove(
        ["encoder-self.*.1", "decoder-self.*.1", "cross.*.1"], text=[(text, text) for text in sentences()]
    )
    assert small.save(tmp_path / "plain", export="native").export == "native"
    assert not (tmp_path / "plain" / "modeling_headscope.py").exists()
    small.save(tmp_path / "own")
    assert (tmp_path / "own" / "modeling_headscope.py").exists()
    with pytest.raises(ConfigError, match="removed for export='self-contained', which cannot become 'masked'"):
        small.save(tmp_path / "masked", export="masked")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "plain"]
    masked = hs.load(model, tokenizer=tokenizer).remove("cross.0.0", export="masked")
    assert masked.save(tmp_path / "masked").export == "masked" and len(masked.heads) == len(hs.load(model).heads)


# Evaluation and translation.


def test_scores_are_those_of_the_command(pair: hs.Model, texts: tuple[Path, Path]) -> None:
    options: dict[str, Any] = {"beam": 2, "bootstrap": 11, "mask": "cross.0.1,cross.0.2"}
    config = EvaluateConfig(hs.assets.trained(), *texts, device="cpu", **options)
    expected = run_evaluation(config)
    found = pair.evaluate(SOURCES, target=TARGETS, **{**options, "mask": ["cross.0.1", "cross.0.2"]})
    assert found.scores == expected.scores and str(found.signature) == str(expected.signature)
    assert_frame_equal(found.sentences, expected.sentences)
    assert found["bleu"].name == "BLEU"
    with pytest.raises(ConfigError, match="unknown metric 'belu'; did you mean 'bleu'"):
        found["belu"]


def test_each_head_off_is_that_of_the_command(pair: hs.Model, texts: tuple[Path, Path]) -> None:
    config = EvaluateConfig(
        hs.assets.trained(),
        *texts,
        each_head=True,
        heads="cross.1.*",
        metrics=("perplexity",),
        bootstrap=11,
        device="cpu",
    )
    table = pair.evaluate_heads(SOURCES, target=TARGETS, heads="cross.1.*", metrics="perplexity", bootstrap=11)
    expected = run_each_head(config)
    assert_frame_equal(table, expected.table)
    assert table.attrs["signature"] == str(expected.signature) and len(table) == 9


def test_translations_are_those_of_the_command(pair: hs.Model, texts: tuple[Path, Path]) -> None:
    found = translate_lines(pair.checkpoint, SOURCES, options=TranslateOptions(beam=3), tokens=2048)
    expected = [best[0].text for best in found]
    assert pair.translate(SOURCES, beam=3) == pair.translate(texts[0], beam=3) == expected
    assert pair.translate(["", *SOURCES[:2], " "], beam=3) == ["", *expected[:2], ""]
    assert pair.translate(SOURCES[:4], mask="cross.*.*") != expected[:4]


# Models in memory.


def snapshot(model: Any) -> dict[str, Any]:
    """Everything of a model that a caller may notice."""
    return {
        "weights": {name: tensor.clone() for name, tensor in model.state_dict().items()},
        "modes": [part.training for part in model.modules()],
        "hooks": [
            (len(part._forward_hooks), len(part._forward_pre_hooks), len(part._backward_hooks))
            for part in model.modules()
        ],
        "gradients": [(each.requires_grad, each.grad is None) for each in model.parameters()],
        "attention": [part.config._attn_implementation for part in model.modules() if hasattr(part, "config")],
        "forward": [part.__dict__.get("forward") for part in model.modules()],
        "device": {each.device for each in model.parameters()},
        "config": model.config.to_dict(),
    }


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama", "t5", "marian"])
def test_a_model_in_memory_is_left_as_it_was(kind: str) -> None:
    model, tokenizer = in_memory(kind)
    model.train()
    next(model.modules()).eval()  # a mixture of modes
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number % 3 != 0)
    model.register_forward_hook(lambda module, arguments, output: None)
    model.set_attn_implementation("eager")
    opened, texts = hs.load(model, tokenizer=tokenizer), sentences()
    target = texts if opened.checkpoint.two_sided else None
    before, noise = snapshot(model), torch.get_rng_state()
    opened.analyze(texts, target=target, importance=True, shapley_samples=1, skip="lrp", bootstrap=5)
    ranking = opened.rank(by="gradient", text=texts, target=target)
    opened.remove(ranking.lowest(len(ranking) // 2)).sizes  # noqa: B018
    opened.evaluate(texts, target=target, metrics="perplexity", bootstrap=5)
    with opened.capture("weights", "context"), opened.gated([str(opened.heads[0])]):
        opened(texts, target=target)
    if kind == "marian":  # transformers itself translates with no T5 that has more layers on one side
        opened.translate(texts[:2], max_len_b=3)
    with pytest.raises(ConfigError), opened.gated("cross.9.9"):
        pass
    after = snapshot(model)
    assert torch.equal(torch.get_rng_state(), noise)
    torch.testing.assert_close(after.pop("weights"), before.pop("weights"), rtol=0, atol=0)
    assert after == before


def test_numbers_of_a_model_in_memory_are_those_of_its_files(tmp_path: Path) -> None:
    model, tokenizer = in_memory("bert")
    model.float().save_pretrained(tmp_path / "files")
    tokenizer.save_pretrained(tmp_path / "files")
    model.train()
    on_disk, here = hs.load(tmp_path / "files", device="cpu"), hs.load(model, tokenizer=tokenizer)
    studies = [each.analyze(sentences(), importance=True, skip="shapley", bootstrap=5) for each in (on_disk, here)]
    assert_frame_equal(studies[0].heads, studies[1].heads)
    checkpoint = studies[1].record["checkpoint"]
    assert checkpoint["path"] == "BertForMaskedLM in memory" and len(checkpoint["digest"]) == 64
    assert repr(here).startswith("<Model BertForMaskedLM in memory (huggingface, bert): encoder-self 2 × 3")


def test_the_digest_of_a_model_in_memory_follows_its_weights_and_nothing_else() -> None:
    model, tokenizer = in_memory("gpt2")
    digests = [hs.load(model, tokenizer=tokenizer).checkpoint.digest]
    model.train().set_attn_implementation("eager")
    digests.append(hs.load(copy.deepcopy(model)).checkpoint.digest)
    with through_attend(model):
        digests.append(hs.load(model).checkpoint.digest)
    assert len(set(digests)) == 1
    with torch.no_grad():
        model.transformer.wte.weight[3, 2] += 1e-6
    assert hs.load(model).checkpoint.digest != digests[0]


def test_a_model_whose_layers_are_replaced_is_looked_at_again() -> None:
    model, tokenizer = in_memory("bert")
    opened = hs.load(model, tokenizer=tokenizer)
    assert len(opened.heads) == 6
    model.bert.encoder.layer = model.bert.encoder.layer[:1]
    assert len(opened.heads) == 3 and len(opened.analyze(sentences(), **CHEAP).heads) == 3


# Capture and gates.


def test_captured_tensors_are_found_by_names(pair: hs.Model) -> None:
    with pair.capture("weights", "context") as heads:
        logits = pair(SOURCES[:3], target=TARGETS[:3])
    weights = heads["cross", 1]["weights"]  # [b h t s]
    assert weights.shape[:3] == (3, 8, logits.shape[1])
    assert torch.equal(heads["cross.1.5"]["weights"], weights[:, 5])
    assert torch.equal(heads[hs.HeadId.parse("cross.1.5")]["context"], heads[hs.Site.CROSS, 1]["context"][:, 5])
    for wrong, message in {
        ("cross", 7): "cross.7 was not captured; captured: encoder-self.0, ",
        "cross.1.8": "cross.1 has no head 8",
        "cros.1.1": "'cros.1.1' is no head",
    }.items():
        with pytest.raises(ConfigError, match=message):
            heads[wrong]  # type: ignore[index]
    with pytest.raises(ConfigError, match="cannot capture weight; what can be captured"), pair.capture("weight"):
        pass


def test_gates_are_names_numbers_or_tensors(pair: hs.Model) -> None:
    def logits(gates: Any = None) -> Tensor:
        if gates is None:
            return pair(SOURCES[:2], target=TARGETS[:2])
        with pair.gated(gates):
            return pair(SOURCES[:2], target=TARGETS[:2])

    whole = logits()
    one = torch.ones(8)
    one[5] = 0
    closed = [logits(["cross.1.5"]), logits("cross.1.5"), logits({"cross.1.5": 0}), logits({("cross", 1): one})]
    assert all(torch.equal(each, closed[0]) for each in closed) and not torch.equal(closed[0], whole)
    assert torch.equal(logits({"cross.*.*": 1.0}), whole)
    assert torch.equal(
        logits({"cross.1.*": 0.5, "cross.0.2": 0}), logits({("cross", 1): one * 0 + 0.5, "cross.0.2": 0.0})
    )
    with pair.masked(["cross.1.5"]):
        assert torch.equal(logits(), closed[0])
    gate = torch.ones(8, requires_grad=True)
    with pair.gated({("cross", 1): gate}):
        pair.checkpoint.logits(_batch(pair)).sum().backward()
    assert gate.grad is not None and gate.grad.abs().min() > 0


def _batch(model: hs.Model) -> Any:
    from headscope.api.opened import one_batch

    return one_batch(model.checkpoint, list(zip(SOURCES[:2], TARGETS[:2], strict=True)))


def test_what_is_measured_under_gates_says_so(pair: hs.Model) -> None:
    plain = pair.analyze(SOURCES, **CHEAP)
    with pair.gated({"encoder-self.0.1": 0.25}), pair.masked("encoder-self.0.3"):
        gated = pair.analyze(SOURCES, **CHEAP)
        assert "|gates:encoder-self.0.1=0.25+encoder-self.0.3=masked|" in gated.signature
        assert "gates:" in str(pair.evaluate(SOURCES, target=TARGETS, metrics="accuracy", bootstrap=5).signature)
        assert "gates:" in pair.rank(by="confidence", text=SOURCES, target=TARGETS).signature
        with pytest.raises(ConfigError, match="outside of the block"):
            pair.remove("cross.0.0")
    assert not gated.heads.equals(plain.heads) and "gates" not in plain.signature
    with pair.gated("encoder-self.*.*"):
        assert "|gates:sha1=" in pair.analyze(SOURCES, **CHEAP).signature
    assert pair.analyze(SOURCES, **CHEAP).signature == plain.signature
    masked = pair.analyze(SOURCES, mask=["encoder-self.0.3"], **CHEAP)
    with pair.masked("encoder-self.0.3"):
        assert_frame_equal(pair.analyze(SOURCES, **CHEAP).heads, masked.heads)


def test_one_pass_gives_what_the_model_predicts() -> None:
    for kind, width in {"bert": speakers.V, "gpt2": speakers.V, "marian": 30}.items():
        opened = hs.load(*in_memory(kind)[:1], tokenizer=in_memory(kind)[1])
        found = opened(sentences())  # an encoder with a decoder and no target gives the encoder's states
        assert found.shape[0] == 5 and found.shape[-1] == width and not found.requires_grad


# What goes wrong.

WRONG: list[tuple[Callable[[hs.Model], Any], type[HeadscopeError], str]] = [
    (lambda m: m.analyze("A dog runs."), DataError, "no file 'A dog runs.'; a sentence itself belongs in a list"),
    (lambda m: m.analyze([]), DataError, "the list of sentences is empty"),
    (lambda m: m.analyze(["a", " "]), DataError, "sentence 2 of the list is empty"),
    (lambda m: m.analyze(["a", 3]), DataError, "sentence 2 of the list is a int; it must be a string"),
    (lambda m: m.analyze(["a", "\ud800"]), DataError, "sentence 2 of the list: character 1 is half a surrogate"),
    (lambda m: m.analyze(5), DataError, "a int is no text; give a file's path"),
    (lambda m: m.analyze(("a", "b", "c")), DataError, "a tuple of 3: a tuple is a pair"),
    (lambda m: m.analyze((["a"], ["b"]), target=["c"]), DataError, "has its target already"),
    (lambda m: m.analyze([("a", "b")], target=["c"]), DataError, "has its target already"),
    (lambda m: m.analyze(["a"], target=["b", "c"]), DataError, "the list of 1 sentences and the list of 2 sentences"),
    (lambda m: m.analyze(), DataError, "no text: give a file's path or a list of sentences"),
    (lambda m: m.analyze(["a"], onyl="x"), ConfigError, "unknown option of analyze 'onyl'; did you mean 'only'"),
    (lambda m: m.analyze(["a"], only="confidance"), ConfigError, "unknown analysis 'confidance'; did you mean"),
    (lambda m: m.analyze(["a"], seed="1"), ConfigError, "seed='1' is of the wrong type; give a whole number"),
    (lambda m: m.analyze(["a"], importance=1), ConfigError, "importance=1 is of the wrong type; give True or False"),
    (lambda m: m.analyze(["a"], only=5), ConfigError, "only=5 is of the wrong type; give a list"),
    (
        lambda m: hs.load(in_memory("bert")[0], tokenizer=in_memory("bert")[1]).analyze(["a"], max_length=999),
        ConfigError,
        "^max_length 999 is more than the 97 positions",
    ),
    (lambda m: m.analyze(["a"], long="cut"), ConfigError, "^long 'cut' is not known; choose truncate or refuse"),
    (lambda m: m.analyze(["a"], mask="cross.7.0"), ConfigError, "no head of this model is called 'cross.7.0'"),
    (lambda m: m.analyze(["a"], mask=[3]), ConfigError, "3 is no head; write it as 'encoder-self.2.5'"),
    (lambda m: m.analyze(["a"], progress="bar"), ConfigError, "progress='bar' is not known; give True, False or a"),
    (lambda m: m.analyze(["a"], only="syntactic"), ConfigError, "no analysis can run: .*needs parse stanza"),
    (lambda m: m.rank(by="gradiant", text=["a"]), ConfigError, "unknown criterion 'gradiant'; did you mean 'gradient'"),
    (lambda m: m.rank(by="confidence"), ConfigError, "by='confidence' is measured on text: give text="),
    (lambda m: m.rank(by="random", sites="encoder"), ConfigError, "^sites encoder: this model has encoder-self"),
    (lambda m: m.remove([]), ConfigError, "no head is to be removed"),
    (lambda m: m.remove("cross.0.0", export="native"), ConfigError, "^export native is not for a native checkpoint"),
    (lambda m: m.evaluate(["a"]), ConfigError, "needs target, the references"),
    (lambda m: m.evaluate([("a", "b")], metrics="blue"), ConfigError, "^metrics 'blue' is not known; available: bleu"),
    (lambda m: m.translate([("a", "b")]), ConfigError, "one text is wanted here"),
    (lambda m: m.translate(["a"], beam=0), ConfigError, "beam"),
    (lambda m: m(["a", "b"], target=["c"]), DataError, "different numbers of lines"),
    (lambda m: m.gated({("cross", 9): torch.ones(8)}).__enter__(), ConfigError, r"no layer \('cross', 9\); it has"),
    (lambda m: m.gated({("cross", 1): torch.ones(7)}).__enter__(), ConfigError, "7 gates for cross.1, which has 8"),
    (lambda m: m.gated(7).__enter__(), ConfigError, "a int names no heads"),
    (lambda m: hs.load("no/such/thing/at/all"), CheckpointError, "there is no file or directory"),
    (lambda m: hs.load(7), ConfigError, "a int cannot be loaded; give a checkpoint's path"),
    (lambda m: hs.load(torch.nn.Linear(2, 2)), ConfigError, "a Linear cannot be loaded"),
    (lambda m: hs.load(in_memory("gpt2")[0], device="cpu"), ConfigError, "device= is for checkpoints on disk"),
    (lambda m: hs.load(hs.assets.trained(), tokenizer=1), ConfigError, "tokenizer= is for a model in memory"),
    (lambda m: hs.load(hs.assets.trained(), dtype="int8"), ConfigError, "unknown dtype 'int8'"),
    (lambda m: hs.load(hs.assets.trained(), bpe="x"), ConfigError, "^bpe means nothing for a native checkpoint"),
    (lambda m: hs.load(in_memory("gpt2")[0]).analyze(["a"]), CheckpointError, "GPT2LMHeadModel in memory cannot read"),
    (lambda m: hs.prune(m, "rank", out="x"), ConfigError, "prune takes a checkpoint's path"),
    (lambda m: hs.prune("x", "rnak", out="x"), ConfigError, "unknown way to prune 'rnak'; did you mean 'rank'"),
    (lambda m: hs.prune("x", "rank", out="x", kepe=3), ConfigError, "unknown option of prune rank 'kepe'"),
    (lambda m: hs.train("bseline", out="x"), ConfigError, "unknown .* 'bseline'; did you mean 'baseline'"),
    (lambda m: hs.train(out="x", lrate=3.0), ConfigError, "unknown option of train baseline 'lrate'"),
    (lambda m: hs.plot("nowhere"), HeadscopeError, "nowhere is no directory"),
    (
        lambda m: hs.plot(m.analyze(["a"], **CHEAP), "haeds"),
        ConfigError,
        "unknown figure 'haeds'; did you mean 'heads'",
    ),
    (lambda m: hs.plot(["a", "b"], "heads"), ConfigError, "the figure 'heads' is of one run; 2 were given"),
    (lambda m: hs.plot([m.analyze(["a"], **CHEAP)], "training"), ConfigError, "is of runs on disk; study is a study"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_errors_are_one_line_in_the_words_of_python(
    pair: hs.Model, call: Callable[[hs.Model], Any], error: type[HeadscopeError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(pair)
    assert isinstance(caught.value, hs.HeadscopeError)
    assert "\n" not in str(caught.value) and " --" not in f" {caught.value}"


def test_a_study_says_what_it_lacks(pair: hs.Model) -> None:
    study = pair.analyze(SOURCES[:3], only="confidence", bootstrap=5)
    for call, message in (
        (lambda: study.table("positonal"), "unknown table 'positonal'; available: heads"),
        (lambda: study.array("similarity/cross/0/cka"), "similarity is an analysis"),
        (lambda: study.plot("positional"), "the study has no table 'positional'; analyze with also='positional'"),
        (lambda: study.plot("similarity"), "the study has no similarity"),
        (lambda: study.plot("faithfulness"), "analyze with faithfulness=True"),
        (lambda: study.plot("heads", colour=1), "the figure 'heads' has no option 'colour'; it has measure, sort"),
        (lambda: study.plot("heads", measure="entropy"), "unknown measure 'entropy'"),
        (lambda: pair.rank(by="entropy", study=study), "there is no column 'entropy' of numbers"),
    ):
        with pytest.raises(HeadscopeError, match=message):
            call()


def test_what_lies_in_a_folder_is_replaced_only_with_force(pair: hs.Model, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "mine.txt").write_text("mine")
    calls: list[bool] = []
    with pytest.raises(OutputError, match="already holds mine"):
        pair.analyze(SOURCES, out=tmp_path / "run", progress=lambda *_: calls.append(True), **CHEAP)
    assert not calls  # refused before anything is measured
    study = pair.analyze(SOURCES[:2], out=tmp_path / "new", figures=False, **CHEAP)
    with pytest.raises(OutputError, match="already holds"):
        study.save(tmp_path / "new")
    study.save(tmp_path / "new", figures=False, force=True)


def test_options_in_messages_are_written_as_in_python() -> None:
    assert (
        python_words("--max-length 3 is more; give --out DIR, a-b --c") == "max_length 3 is more; give out DIR, a-b c"
    )


# Progress.


def test_progress_is_reported_to_a_function(pair: hs.Model) -> None:
    told: list[tuple[str, int, int]] = []
    pair.analyze(SOURCES, progress=lambda *entry: told.append(entry), **CHEAP)
    assert told[0] == ("analysing", 0, N) and told[-1] == ("analysing", N, N)
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)


def test_a_bar_is_shown_on_demand(pair: hs.Model, capfd: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    pair.analyze(SOURCES, progress=True, **CHEAP)
    printed = capfd.readouterr()
    assert "analysing" in printed.err and not printed.out


# Pruning and training.


def test_prune_writes_what_the_command_writes(texts: tuple[Path, Path], tmp_path: Path) -> None:
    shared: dict[str, Any] = {"source": str(texts[0]), "target": texts[1], "sites": "encoder-self", "device": "cpu"}
    told: list[tuple[str, int, int]] = []
    choice = hs.prune(
        hs.assets.trained(),
        "subset",
        out=tmp_path / "subset",
        keep=16,
        updates=2,
        freeze="model",
        progress=lambda *entry: told.append(entry),
        **shared,
    )
    assert len(choice.removed) == 8 and ("learning", 2, 2) in told
    assert len((tmp_path / "subset" / "removed.txt").read_text().splitlines()) == 8
    ranked = hs.prune(hs.assets.trained(), "rank", out=tmp_path / "rank", by="magnitude", keep=20, device="cpu")
    assert hs.load(hs.assets.trained()).rank(by="magnitude").lowest(52) == ranked.removed
    assert hs.plot([tmp_path / "rank"], "pruning").axes


def test_train_writes_a_model_that_opens(texts: tuple[Path, Path], tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    outcome = hs.train(
        "wide",
        out=tmp_path / "run",
        source=texts[0],
        target=str(texts[1]),
        vocab_size=60,
        d_model=16,
        d_ffn=16,
        heads=4,
        d_head=8,
        encoder_layers=1,
        decoder_layers=1,
        max_updates=3,
        bleu_every=0,
        device="cpu",
        progress=lambda *entry: told.append(entry),
    )
    assert outcome.update == 3 and told[-1] == ("training", 3, 3)
    trained = hs.load(tmp_path / "run" / "last")
    assert trained.layout[hs.Site.CROSS, 0] == 4 and len(trained.translate(["A dog runs."])) == 1
    assert hs.plot(tmp_path / "run", "training").axes


@pytest.fixture(autouse=True)
def _no_figures_pile_up() -> Iterator[None]:
    yield
    import matplotlib.pyplot

    assert not matplotlib.pyplot.get_fignums()  # figures are the caller's, not pyplot's


def test_a_checkpoint_that_was_opened_already_is_a_model() -> None:
    opened = open_checkpoint(hs.assets.trained(), device="cpu")
    assert len(hs.Model(opened).heads) == 72
