"""Heads switched off by name: what a mask equals, in every command, with and without mixing."""

import copy
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import headscope as hs
from headscope.assets import trained_model
from headscope.cli.analyze import typed_text
from headscope.config.analyze import AnalyzeOptions
from headscope.engine.plan import chosen_analyses
from headscope.errors import ConfigError, DataError
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, Layout, Site, select_heads
from headscope.model.taps import gated, masked
from headscope.report.page.write import facts
from headscope.report.registry import find_figure
from headscope.results.study import Study
from tests.contracts.architectures import silence
from tests.makers.shared import Command, succeed, write_lines
from tests.oracles import checkpoints, native, patching, prompts, speakers
from tests.oracles.checkpoints import SOURCES, TARGETS
from tests.oracles.patching import Eager


@torch.no_grad()
def test_a_mask_acts_before_mixing_and_a_gate_after_it() -> None:
    model = native.model(self_mixing="alpha.v1")
    head = HeadId(Site.DECODER_SELF, 2, 1)
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    name = "decoder.layers.2.self_attention.mixing.alpha"
    before.get_parameter(name)[:, 1] = 0.0
    after.get_parameter(name)[1, :] = 0.0
    with masked(model, [head]):
        assert torch.allclose(native.batch_logits(model), native.batch_logits(before), atol=1e-12)
    with gated(model, [head]):
        assert torch.allclose(native.batch_logits(model), native.batch_logits(after), atol=1e-12)


@pytest.mark.slow
def test_analyze_measures_the_other_heads_of_a_masked_model_and_says_so(tmp_path: Path, command: Command) -> None:
    checkpoint = checkpoints.small()
    NATIVE.save(checkpoint, tmp_path / "whole")
    silence(checkpoint.model, select_heads("encoder-self.0.*,cross.1.0", checkpoint.layout))
    NATIVE.save(checkpoint, tmp_path / "cut")
    source, target = write_lines(tmp_path / "source", SOURCES), write_lines(tmp_path / "target", TARGETS)
    options = ["--source", source, "--target", target, "--only", "confidence", "--no-figures", "--bootstrap", 20]
    for name, mask in (("whole", ["--mask", "encoder-self.0.*,cross.1.0"]), ("cut", [])):
        succeed(command, "analyze", tmp_path / name, *options, "--out", tmp_path / f"run-{name}", *mask)
    first, second = (pd.read_csv(tmp_path / f"run-{name}" / "heads.csv") for name in ("whole", "cut"))
    assert first["confidence"].tolist() == pytest.approx(second["confidence"].tolist(), abs=1e-9)
    meta = json.loads((tmp_path / "run-whole" / "run.json").read_text())
    assert meta["options"]["mask"] == "encoder-self.0.0,encoder-self.0.1,encoder-self.0.2,cross.1.0"
    assert "|mask:encoder-self.0.0," in meta["signature"]
    assert "mask" not in json.loads((tmp_path / "run-cut" / "run.json").read_text())["signature"]


# Sentences that are typed in or piped in, in the place of files.


DASH = "-"


def stdin(monkeypatch: pytest.MonkeyPatch, text: str, *, terminal: bool = False) -> None:
    """`text` is on stdin."""
    stream = io.TextIOWrapper(io.BytesIO(text.encode()))
    monkeypatch.setattr(stream, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stream)


def test_a_pipe_gives_lines_and_pairs_of_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, "a b\nc\n")
    assert typed_text({"source": DASH, "target": "x"}) == {"source": ["a b", "c"]}
    stdin(monkeypatch, "a b\tx\nc\ty z")
    assert typed_text({"source": DASH, "target": DASH}) == {"source": ["a b", "c"], "target": ["x", "y z"]}
    assert typed_text({"source": "x", "target": None}) == {}


def test_a_terminal_is_told_what_to_type(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    stdin(monkeypatch, "a b\tx\nc\ty\n", terminal=True)
    assert typed_text({"source": DASH, "target": DASH}) == {"source": ["a b", "c"], "target": ["x", "y"]}
    assert capsys.readouterr() == ("", "one sentence a line, a tab, its translation; Ctrl-D ends\n")


@pytest.mark.parametrize(
    ("text", "target", "message"),
    [
        ("", None, "stdin"),
        ("a\n\nb\n", None, "stdin:2:"),
        ("a\tx\nb\n", DASH, "stdin:2:.*--source.*--target"),
        ("a\t\n", DASH, "stdin:1:"),
    ],
)
def test_what_a_pipe_must_hold(text: str, target: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin(monkeypatch, text)
    with pytest.raises(DataError, match=message):
        typed_text({"source": DASH, "target": target})


@pytest.mark.slow
def test_a_typed_sentence_makes_the_page_and_stays_with_the_run(
    monkeypatch: pytest.MonkeyPatch, command: Command, tmp_path: Path
) -> None:
    out, source, target = tmp_path / "run", "A dog plays on the beach .", "Ein Hund spielt am Strand ."
    stdin(monkeypatch, f"{source}\t{target}\n")
    options = ("--only", "confidence", "--bootstrap", 20, "--no-figures")
    succeed(command, "analyze", trained_model(), "--source", "-", "--target", "-", "--out", out, *options)
    assert (out / "report.html").is_file()
    texts = json.loads((out / "run.json").read_text(encoding="utf-8"))["options"]["typed"]
    assert texts == {"source": [source], "target": [target]}
    run = Study.open(out)
    assert run.data == "typed in → typed in, 1 sentence"
    (example,) = run.examples
    assert {site: weights.shape[0] for site, weights in example.weights.items()} == dict.fromkeys(
        ("encoder-self", "decoder-self", "cross"), 24
    )
    figure = find_figure("glance").draw_runs([run], find_figure("glance").Options(index=0))
    images = [np.asarray(axes.images[0].get_array()) for axes in figure.axes if axes.images]
    assert len(images) == 3
    _, t, s = example.weights["cross"].shape
    expected = example.weights["cross"][8 + 2] / 255  # layer 1, head 2
    down, across = images[2].shape[0] // 3, images[2].shape[1] // 8
    assert images[2][down : down + t, 2 * across : 2 * across + s] == pytest.approx(expected, abs=1 / 255)


# `headscope analyze --clean --corrupt --answer`, from files to the answer; and the same in Python.


FAST = ("--no-figures", "--bootstrap", 19)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    gpt2: Any = speakers.checkpoint("gpt2")
    gpt2.model.save_pretrained(folder)
    gpt2.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    clean, corrupt, answers, _ = prompts.lines("gpt2")
    parts = {"clean": clean, "corrupt": corrupt, "answer": answers}
    return {name: write_lines(tmp_path / f"{name}.txt", lines) for name, lines in parts.items()}


def flags(files: dict[str, Path]) -> list[object]:
    return [part for name, path in files.items() for part in (f"--{name}", path)]


@pytest.mark.slow
def test_files_and_answers(checkpoint: Path, files: dict[str, Path], tmp_path: Path, command: Command) -> None:
    out = tmp_path / "run"
    arguments = ("analyze", checkpoint, *flags(files), "--out", out, "--dtype", "float64", *FAST)
    output = succeed(command, *arguments, "--only", "prompts", "--set", "eap_ig.eap-steps=2")
    tables = {name: pd.read_csv(out / f"{name}.csv") for name in ("heads", "patching", "patching_agreement")}
    gpt2 = speakers.checkpoint("gpt2")
    eager = [Eager(gpt2.model, "gpt2", prompt, dict(gpt2.layout)) for prompt in prompts.prompts("gpt2")]
    exact = [patching.exact(model, "noising") for model in eager]
    expected = torch.cat([torch.stack([row[Site.DECODER_SELF, n] for row in exact]).mean(0) for n in (0, 1)])
    assert tables["heads"]["patching"].tolist() == pytest.approx(expected.tolist(), abs=1e-9)
    row: Any = tables["patching_agreement"].set_index(["first", "second"]).loc[("patching", "eap_ig")]
    tests = tables["patching"]
    significant = tests[(tests["measure"] == "patching") & (tests["p_adjusted"] <= 0.05)][["site", "layer", "head"]]
    pair = tables["heads"].merge(significant)[["patching", "eap_ig"]]
    assert row["heads"] == len(pair)
    expected_r = [pair.corr(method=kind).iloc[0, 1] if len(pair) > 2 else np.nan for kind in ("spearman", "pearson")]
    assert [row.spearman, row.pearson] == pytest.approx(expected_r, nan_ok=True)
    prompts_table = pd.read_csv(out / "patching_prompts.csv")
    assert prompts_table["answer"].tolist() == [line.split("\t")[0] for line in prompts.lines("gpt2")[2]]
    total_effect = (prompts_table["clean"] - prompts_table["corrupt"]).mean()
    assert tables["heads"]["patching_share"].tolist() == pytest.approx((expected / total_effect).tolist())
    assert "Which heads the answers need" in output
    head: Any = max(tables["heads"].to_dict("records"), key=lambda row: row["patching"])
    (answer,) = [answer for answer in Study.open(out).answers() if answer.question == "Which heads the answers need"]
    assert answer.heads[:1] in ((f"decoder-self.{head['layer']}.{head['head']}",), ())
    assert Study.open(out).data == f"clean.txt, {prompts.COUNT} sentences"
    assert facts(Study.open(out))["answer"] == str(files["answer"])
    succeed(command, "plot", "attention", out, "--index", 1, "--heads", "decoder-self.0.*", "--out", tmp_path / "a.png")
    record = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert record["data"]["clean"] == str(files["clean"]) and record["data"]["in_corpus"] == prompts.COUNT
    assert "m:patching+attribution_patching+eap_ig|patched:noising" in record["signature"]

    texts = [list(part) for part in prompts.lines("gpt2")[:2]]
    answers: list[Any] = [tuple(line.split("\t")) if "\t" in line else line for line in prompts.lines("gpt2")[2]]
    study = hs.load(str(checkpoint), dtype="float64").analyze(
        clean=texts[0], corrupt=texts[1], answer=answers, only="prompts", bootstrap=19, eap_steps=2
    )
    assert study.heads["eap_ig"].tolist() == pytest.approx(tables["heads"]["eap_ig"].tolist(), abs=1e-12)


def test_prompts_run_patching_beside_the_others_unless_something_else_is_wanted() -> None:
    group = {"patching", "attribution_patching", "eap_ig"}

    def names(prompts: bool, **options: Any) -> set[str]:
        return {cls.name for cls in chosen_analyses(AnalyzeOptions(**options), prompts=prompts)}

    assert group < names(True) and "entropy" in names(True) and not group & names(False)
    assert (
        names(True, only=("entropy",)) == {"entropy"}
        and names(True, only=("patching",)) == {"patching"}
        and "eap_ig" not in names(True, skip=("eap_ig",))
    )
    with pytest.raises(ConfigError, match="--direction"):
        names(False, analysis_options={"direction": "denoising"})


# Names of heads: with and without their site, and what is said of those that a model lacks.


ONE_SITE: Layout = {(Site.DECODER_SELF, 0): 2, (Site.DECODER_SELF, 3): 4}  # a hybrid: layers 1 and 2 have no attention
TWO_SITES: Layout = {(Site.ENCODER_SELF, 0): 2, (Site.CROSS, 0): 2}


@pytest.mark.parametrize("names", ["3.1", "decoder-self.3.1", "3.1,decoder-self.3.1"])
def test_a_model_with_one_site_needs_no_site_in_names(names: str, tmp_path: Path) -> None:
    (tmp_path / "list").write_text(names.replace(",", "\n"), encoding="utf-8")
    head = HeadId(Site.DECODER_SELF, 3, 1)
    assert select_heads(names, ONE_SITE) == select_heads(str(tmp_path / "list"), ONE_SITE) == [head]
    assert HeadId.parse(names.split(",")[0], ONE_SITE) == head and head.name([Site.DECODER_SELF]) == "3.1"
    assert select_heads("*.1", ONE_SITE) == [HeadId(Site.DECODER_SELF, layer, 1) for layer in (0, 3)]


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        ("3.7", ONE_SITE, "no head of this model is called '3.7'; this model has decoder-self 4 × 2/0/0/4: write 3.3"),
        ("cross.0.0", ONE_SITE, "this model has decoder-self"),
        ("3.1.2.4", ONE_SITE, "'3.1.2.4' is not the name of a head.*no file.*this model has decoder-self .*write 3.3"),
        ("0.1", TWO_SITES, "'0.1' is not .*; this model has encoder-self 1 × 2, cross 1 × 2: write cross.0.1"),
        ("0.1,cross.0.0", TWO_SITES, "'0.1' is not the name of a head"),
    ],
)
def test_other_names_are_answered_with_the_sites_of_this_model(name: str, layout: Layout, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        select_heads(name, layout)
