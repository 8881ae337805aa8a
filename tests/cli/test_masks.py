"""Heads switched off by name: what a mask equals, in every command, with and without mixing."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from headscope.cli import main
from headscope.config.small import TranslateOptions
from headscope.evaluation.likelihood import LikelihoodOptions, likelihood
from headscope.evaluation.translation import translate_lines
from headscope.formats.native import NATIVE
from headscope.heads import HeadId, Site, select_heads
from headscope.model.projections import projections
from headscope.model.taps import gated, masked
from tests.oracles import checkpoints, native
from tests.oracles.checkpoints import SOURCES, TARGETS

NAMES = "encoder-self.1.1,decoder-self.2.0,cross.0.*"
TEXTS = ["ah bi ck", "aj", "bl ci ak bh cj"]


def corpus(folder: Path, source: list[str], target: list[str] | None) -> Any:
    from headscope.data.corpus import open_corpus

    paths = []
    for name, lines in (("source", source), ("target", target)):
        paths.append(folder / name)
        paths[-1].write_text("\n".join(lines or []) + "\n", encoding="utf-8")
    return open_corpus(paths[0], target=paths[1] if target else None)


def without_columns(checkpoint: Any, heads: list[HeadId]) -> Any:
    """The same checkpoint with the heads' slices of the output projections zeroed."""
    cut = copy.copy(checkpoint)
    cut.__dict__.pop("attention_sites", None)
    cut.model = copy.deepcopy(checkpoint.model)
    found = projections(cut.model)
    with torch.no_grad():
        for head in heads:
            output = found[head.site, head.layer].output
            assert output is not None
            index = output.units[head.head]
            output.weight.index_fill_(output.axis, index, 0.0)
    return cut


@pytest.mark.parametrize("kind", ["native", "bart", "bert", "gpt2"])
def test_a_mask_equals_zeroed_columns_of_the_output_projection(kind: str, tmp_path: Path) -> None:
    checkpoint: Any = checkpoints.small() if kind == "native" else checkpoints.hugging(kind)
    source, target = (SOURCES, TARGETS) if kind == "native" else (TEXTS, TEXTS[::-1])
    names = {"native": NAMES, "bart": "encoder-self.1.1,cross.0.*,decoder-self.1.4", "bert": "encoder-self.0.*"}
    heads = select_heads(names.get(kind, "decoder-self.1.*,decoder-self.0.2"), checkpoint.layout)
    cut = without_columns(checkpoint, heads)
    texts = corpus(tmp_path, source, target if checkpoint.two_sided else None)
    by_mask = likelihood(checkpoint, texts, LikelihoodOptions(30, 50), masks=[heads])
    by_cut = likelihood(cut, texts, LikelihoodOptions(30, 50))
    assert by_mask.first.tolist() == pytest.approx(by_cut.first.tolist(), abs=1e-9)
    assert by_mask.first.tolist() != pytest.approx(
        likelihood(checkpoint, texts, LikelihoodOptions(30, 50)).first.tolist()
    )
    if checkpoint.two_sided:
        options = TranslateOptions(beam=3, max_extra=8)
        with masked(checkpoint.model, heads):
            found = list(translate_lines(checkpoint, source, options=options, tokens=30))
        assert [each[0].text for each in found] == [
            each[0].text for each in translate_lines(cut, source, options=options, tokens=30)
        ]


@torch.no_grad()
def test_a_mask_acts_before_mixing_and_a_gate_after_it() -> None:
    model = native.model(self_mixing="alpha.v1")
    source, target, source_mask, target_mask = native.texts()
    given = {"source_mask": source_mask, "target_mask": target_mask}
    head = HeadId(Site.DECODER_SELF, 2, 1)
    before, after = copy.deepcopy(model), copy.deepcopy(model)
    name = "decoder.layers.2.self_attention.mixing.alpha"
    before.get_parameter(name)[:, 1] = 0.0
    after.get_parameter(name)[1, :] = 0.0
    with masked(model, [head]):
        assert torch.allclose(model(source, target, **given), before(source, target, **given), atol=1e-12)
    with gated(model, [head]):
        assert torch.allclose(model(source, target, **given), after(source, target, **given), atol=1e-12)


@pytest.mark.slow
def test_analyze_measures_the_other_heads_of_a_masked_model_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint = checkpoints.small()
    cut = without_columns(checkpoint, select_heads("encoder-self.0.*,cross.1.0", checkpoint.layout))
    NATIVE.save(checkpoint, tmp_path / "whole")
    NATIVE.save(cut, tmp_path / "cut")
    corpus(tmp_path, SOURCES, TARGETS)
    texts = ["--source", tmp_path / "source", "--target", tmp_path / "target", "--only", "confidence"]
    for name, mask in (("whole", ["--mask", "encoder-self.0.*,cross.1.0"]), ("cut", [])):
        run = ["analyze", tmp_path / name, *texts, "--out", tmp_path / f"run-{name}", "--no-figures", *mask]
        monkeypatch.setattr(sys, "argv", ["headscope", *map(str, run), "--bootstrap", "20"])
        with pytest.raises(SystemExit) as ended:
            main.run()
        assert not ended.value.code
    one, two = (pd.read_csv(tmp_path / f"run-{name}" / "heads.csv") for name in ("whole", "cut"))
    assert one["confidence"].tolist() == pytest.approx(two["confidence"].tolist(), abs=1e-9)
    meta = json.loads((tmp_path / "run-whole" / "run.json").read_text())
    assert meta["options"]["mask"] == "encoder-self.0.0,encoder-self.0.1,encoder-self.0.2,cross.1.0"
    assert "|mask:encoder-self.0.0," in meta["signature"]
    assert "mask" not in json.loads((tmp_path / "run-cut" / "run.json").read_text())["signature"]
