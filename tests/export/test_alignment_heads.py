"""Alignment heads: where engines read them, what removal makes of them, and how a measurement writes them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers

import headscope as hs
import headscope.model.transformers_attention  # registers the attention of models made here
from headscope.assets import captions, trained_model
from headscope.config.analyze import AnalyzeConfig
from headscope.data.encoded import Batch, pad_side
from headscope.engine.study import run_analysis
from headscope.errors import CheckpointError, ConfigError, OutputError
from headscope.export.alignment import (
    align,
    aligning_heads,
    check_alignment_model,
    read_model,
    write_alignment,
    write_model,
)
from headscope.export.ctranslate2 import specification, translator_of
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface.shrink import shrink_model
from headscope.heads import HeadId, Site
from headscope.model.discovery import find_attention
from headscope.model.removal_plan import alignment_heads, alignment_note, plan_removal
from headscope.model.taps import capture
from headscope.pruning.options.choice import RankConfig
from headscope.pruning.options.removal import RemoveConfig
from headscope.pruning.removal.remove import run_removal
from headscope.pruning.selection import gates_for
from headscope.results.study import Study
from tests.makers.speech import whisper as small_whisper
from tests.makers.translators import build_translator
from tests.makers.wrappers import hugging_face

PIECES = ["a@@", "h", "b@@", "i", "k"]


def head(layer: int, number: int) -> HeadId:
    return HeadId(Site.CROSS, layer, number)


def run_engine(folder: Path) -> tuple[list[str], Any]:
    """CTranslate2's translation of the pieces, and the attention [t s] that it returns."""
    engine = pytest.importorskip("ctranslate2").Translator(str(folder), device="cpu", intra_threads=1)
    (result,) = engine.translate_batch(
        [PIECES], beam_size=1, max_decoding_length=7, return_attention=True, suppress_sequences=[["<pad>"]]
    )
    return result.hypotheses[0], np.array(result.attention[0])


def weights(checkpoint: Any, tokens: list[str], heads: list[HeadId]) -> Any:
    """The mean weights [t s] of heads while the decoder is forced to these tokens."""
    numbers = {token: number for number, token in enumerate(checkpoint.target.subwords)}
    source = checkpoint.encode([" ".join(PIECES)], side="source", limit=20)
    target = checkpoint.encode(["h"], side="target", limit=20)[0]
    target.ids[:], target.special[:] = [target.ids[0], *(numbers[item] for item in tokens[:-1])], [False] * len(tokens)
    with capture(checkpoint.model) as attention, torch.no_grad():
        checkpoint.logits(Batch(torch.arange(1), 0, pad_side(source), pad_side([target])))
    return torch.stack([attention[item]["weights"][0] for item in heads]).mean(dim=0).numpy()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_ctranslate2_returns_the_weights_of_the_heads_that_are_named(tmp_path: Path, quantization: str | None) -> None:
    pytest.importorskip("ctranslate2")
    checkpoint = build_translator()
    spec = specification(translator_of(checkpoint))
    spec._quantize(quantization)
    spec.save(str(tmp_path))
    tokens, _ = run_engine(tmp_path)
    tolerance = 0.05 if quantization else 1e-5
    for heads, pairs in (([(1, 2), (0, 0), (1, 0)], [(1, 2), (1, 0)]), ([(0, 1)], [(0, 1)]), ([(1, 1)], [(1, 1)])):
        assert align(tmp_path, [head(*pair) for pair in heads]) == [head(*pair) for pair in pairs]
        repeat, attention = run_engine(tmp_path)
        assert repeat == tokens
        expected = weights(checkpoint, tokens, [head(*pair) for pair in pairs])
        np.testing.assert_allclose(attention[: len(tokens)], expected[:, : attention.shape[1]], atol=tolerance)


def test_a_model_file_is_written_as_it_was_read(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    specification(translator_of(build_translator())).save(str(tmp_path))
    write_model(read_model(tmp_path), tmp_path / "again")
    content, copy = (tmp_path / "model.bin").read_bytes(), (tmp_path / "again").read_bytes()
    assert sorted(content) == sorted(copy)
    (tmp_path / "model.bin").write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match="truncated"):
        read_model(tmp_path)


def whisper(heads: list[list[int]]) -> Any:
    """A small random Whisper whose generation settings name heads."""
    ids = {"pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3}
    model = small_whisper(vocab_size=23, max_source_positions=11, max_target_positions=13, **ids)
    model.set_attn_implementation("headscope")
    model.generation_config.alignment_heads = heads
    return model


def shrink(model: Any, *heads: HeadId) -> Any:
    return shrink_model(model, plan_removal(find_attention(model), heads))


def test_removal_counts_alignment_heads_anew() -> None:
    model = whisper([[0, 0], [0, 2], [1, 1]])
    smaller = shrink(model, head(0, 0), head(0, 1), HeadId(Site.DECODER_SELF, 1, 1))
    assert smaller.generation_config.alignment_heads == [[0, 0], [1, 1]]
    assert model.generation_config.alignment_heads == [[0, 0], [0, 2], [1, 1]]
    (note,) = alignment_note(model, smaller)
    assert "2 of 3 alignment heads" in note and "--protect alignment" in note
    encoder_cut = shrink(model, HeadId(Site.ENCODER_SELF, 0, 1))
    assert alignment_note(model, encoder_cut) == ()
    empty = shrink(whisper([[1, 1]]), head(1, 1))
    assert alignment_heads(empty) == [] and not hasattr(empty.generation_config, "alignment_heads")


def test_heads_that_the_settings_name_are_protected() -> None:
    model = whisper([[0, 2], [1, 0]])
    checkpoint = hugging_face(model)
    options: dict[str, Any] = {"checkpoint": "memory", "out": Path("out"), "by": "magnitude", "keep": 6}
    gating = gates_for(checkpoint, RankConfig(protect="alignment,cross.1.2", **options), whole_groups=True)
    assert gating.protected_heads == (head(0, 2), head(1, 0), head(1, 2))
    model.generation_config.alignment_heads = None
    with pytest.raises(ConfigError, match="alignment heads"):
        gates_for(checkpoint, RankConfig(protect="alignment", **options), whole_groups=True)


def test_a_measurement_names_the_labelled_heads_best_first() -> None:
    table = pd.DataFrame(
        {
            "site": ["cross"] * 3 + ["decoder-self"],
            "layer": [0, 0, 1, 1],
            "head": [0, 1, 1, 0],
            "functions": ["aligned:predicted", "", "sink;aligned:predicted", ""],
            "aligned_predicted": [0.5, 0.9, 0.7, np.nan],
            "alignment_score": [0.2, 0.8, 0.3, 0.99],
        }
    )
    for speech in (True, False):
        assert aligning_heads(table, 6, speech=speech) == ([head(1, 1), head(0, 0)], "aligned_predicted")
    table["functions"] = ""
    assert aligning_heads(table, 1, speech=False) == ([head(0, 1)], "alignment_score")
    assert aligning_heads(table, 1, speech=True) == ([head(1, 1)], ""), "all of the upper half"


def test_the_heads_are_written_into_the_settings_of_a_model(tmp_path: Path) -> None:
    model = whisper([[0, 0]])
    model.save_pretrained(tmp_path)
    before = json.loads((tmp_path / "generation_config.json").read_text())
    layout = find_attention(model).layout
    check_alignment_model(tmp_path, layout)
    message = write_alignment(tmp_path, [head(1, 2), head(0, 1)])
    assert "cross.0.1, cross.1.2" in message
    after = json.loads((tmp_path / "generation_config.json").read_text())
    expected = {name: value for name, value in before.items() if not name.startswith("_")}
    assert after == {**expected, "alignment_heads": [[0, 1], [1, 2]]}
    (tmp_path / "generation_config.json").unlink()
    write_alignment(tmp_path, [head(0, 1)])
    settings: Any = transformers.GenerationConfig.from_pretrained(tmp_path)
    assert settings.alignment_heads == [[0, 1]] and settings.decoder_start_token_id == 3
    with pytest.raises(ConfigError, match="cross heads"):
        check_alignment_model(tmp_path, {**layout, (Site.CROSS, 1): 2})
    with pytest.raises(ConfigError, match="not a model that stores them"):
        check_alignment_model(tmp_path / "nowhere", layout)


@pytest.mark.slow
def test_a_whisper_is_cut_proved_and_written_with_its_alignment_heads(tmp_path: Path) -> None:
    whisper([[0, 2], [1, 0]]).save_pretrained(tmp_path / "whole")
    result = run_removal(
        RemoveConfig(
            checkpoint=str(tmp_path / "whole"), out=tmp_path / "small", heads="cross.0.0,cross.1.0,encoder-self.0.1",
            rounds=0,
        )
    )  # fmt: skip
    assert (
        result.record["verified"]["difference"] < 1e-5
        and result.record["verified"]["cached"] is not None
        and result.record["verified"]["cached"] < 1e-5
    )
    assert any("1 of 2 alignment heads" in note for note in result.record["notes"])
    settings = json.loads((tmp_path / "small" / "generation_config.json").read_text())
    assert settings["alignment_heads"] == [[0, 1]]


@pytest.mark.slow
def test_analyze_writes_what_it_measured(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    folder = tmp_path / "engine"
    folder.mkdir()
    specification(translator_of(open_checkpoint(trained_model(), device="cpu"))).save(str(folder))
    files: dict[str, Any] = {"source": captions("en"), "target": captions("de"), "figures": False}
    options = {"alignments": captions("align")}
    config = AnalyzeConfig(
        checkpoint=trained_model(), out=tmp_path / "run", only=("alignment",), max_sentences=40, bootstrap=20,
        write_alignment=folder, alignment_heads=3, analysis_options=options, **files,
    )  # fmt: skip
    with pytest.raises(OutputError, match="lies in"):
        run_analysis(replace(config, out=folder / "run"))
    result = run_analysis(config)
    table = result.heads[result.heads["site"] == "cross"]
    best = table.sort_values("aligned_predicted").iloc[-1]
    assert f"mean over cross.{best['layer']}.{best['head']}" in result.record["alignment_heads"]
    assert Study.open(tmp_path / "run").answers() == result.answers()
    assert int(read_model(folder).arrays["decoder/alignment_layer"][1]) == best["layer"]
    with pytest.raises(ConfigError, match="--only alignment"):
        run_analysis(replace(config, only=("entropy",), analysis_options={}, out=tmp_path / "other"))
    more: Any = {"alignments": captions("align")}
    study = hs.load(trained_model()).analyze(
        captions("en"), target=captions("de"), only="alignment", max_sentences=40, **more
    )
    assert study.write_alignment(folder, heads=3) in result.record["alignment_heads"]
    entropy = hs.load(trained_model()).analyze(["A dog runs."], target=["Ein Hund rennt."], only="entropy")
    with pytest.raises(ConfigError, match="alignment"):
        entropy.write_alignment(folder)
