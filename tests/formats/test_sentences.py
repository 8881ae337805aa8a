"""Folders of sentence-transformers: texts are read, and vectors are made, as SentenceTransformer does it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headscope as hs
from headscope.data.encoded import Batch, pad_side
from headscope.formats.base import open_checkpoint
from tests.oracles import tiny

pytestmark = pytest.mark.slow

sentence_transformers = pytest.importorskip("sentence_transformers")
modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
base = pytest.importorskip("sentence_transformers.base.modules")
TEXTS = [" ".join(tiny.WORDS[:9]), " ".join(tiny.WORDS[9:12]).upper(), tiny.WORDS[20], "ah bi ch di"]
PROMPT = "ah ai "
CASES: dict[str, dict[str, Any]] = {
    **{mode: {"pooling": mode} for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")},
    "two": {"pooling": ("cls", "max")},
    "lower-case": {"lower": True},
    "short": {"longest": 6, "pooling": "lasttoken"},
    "prompt": {"prompt": PROMPT},
    "prompt left out": {"prompt": PROMPT, "include": False, "lower": True},
    "dense": {"dense": {}, "normalize": True},
    "dense residual": {"dense": {"use_residual": True, "bias": False, "activation_function": torch.nn.GELU()}},
    "normalised first": {"normalize": True, "dense": {"activation_function": None}, "last": "LayerNorm"},
}


def _save_model(folder: Path, case: dict[str, Any]) -> Any:
    """A tiny sentence-transformers model, saved in a folder."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(tiny.PIECES), hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=11,
        max_position_embeddings=40, initializer_range=0.5,
    )  # fmt: skip
    bert = folder.parent / "bert"
    transformers.BertModel(config).save_pretrained(bert)
    tiny.tokenizer([2], [3]).save_pretrained(bert)
    longest, lower = case.get("longest"), case.get("lower", False)
    pooling = modules.Pooling(12, pooling_mode=case.get("pooling", "mean"), include_prompt=case.get("include", True))
    parts = [base.Transformer(str(bert), max_seq_length=longest, do_lower_case=lower), pooling]
    parts += [base.Normalize()] if case.get("normalize") else []
    parts += [base.Dense(12, 7, **case["dense"])] if "dense" in case else []
    parts += [modules.LayerNorm(7)] if case.get("last") == "LayerNorm" else []
    prompts = {"prompts": {"own": case["prompt"]}, "default_prompt_name": "own"} if "prompt" in case else {}
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu", **prompts)
    model.save(str(folder))
    return model


def _cosines(first: Path, second: Path, texts: list[str], **trust: bool) -> float:
    """Mean cosine between SentenceTransformer's vectors of texts from two folders."""
    left, right = (
        sentence_transformers.SentenceTransformer(str(path), device="cpu", **trust).encode(
            texts, convert_to_tensor=True
        )
        for path in (first, second)
    )
    return float(torch.nn.functional.cosine_similarity(left, right).mean())


@pytest.mark.parametrize("name", CASES)
def test_vectors_and_places_are_those_of_sentence_transformer(tmp_path: Path, name: str) -> None:
    _save_model(folder := tmp_path / "st", CASES[name])
    checkpoint: Any = open_checkpoint(str(folder), device="cpu")
    encodings = checkpoint.encode(TEXTS, side="source", limit=checkpoint.default_length)
    batch = Batch(torch.arange(len(TEXTS)), 0, pad_side(encodings), None)
    with torch.no_grad():
        ours = checkpoint.pool(checkpoint.states(batch), batch.source.real)
    theirs = sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS, convert_to_tensor=True)
    torch.testing.assert_close(ours, theirs.cpu(), rtol=1e-4, atol=1e-5)
    for text, encoding in zip(TEXTS, encodings, strict=True):
        spans = checkpoint.spans(text, encoding.ids, side="source")
        words = [text[slice(*span)] for span in spans if span]
        assert words == text.split()[: len(words)], "places are those in the text, without the prompt"
        assert [span is None for span in spans] == encoding.special


@pytest.mark.parametrize("name", ["two", "prompt left out"])
def test_cosines_of_copies_are_those_of_sentence_transformer(tmp_path: Path, name: str) -> None:
    _save_model(folder := tmp_path / "st", CASES[name])
    smaller = hs.load(folder, device="cpu").remove("encoder-self.0.1,encoder-self.1.*").save(tmp_path / "small").path
    expected = _cosines(folder, smaller, TEXTS, trust_remote_code=True)
    for value in (
        hs.evaluate(smaller, TEXTS, against=folder, metrics="cosine", bootstrap=5)["cosine"].value,
        hs.load(folder, device="cpu")
        .evaluate(TEXTS, mask="encoder-self.0.1,encoder-self.1.*", metrics="cosine", bootstrap=5)["cosine"]
        .value,
    ):
        assert value == pytest.approx(expected, abs=1e-5) and expected < 0.99


def test_an_encoder_in_a_folder_of_its_own_is_written_with_all_modules(tmp_path: Path) -> None:
    """The layout before version 2, opened at the folder and at its encoder."""
    _save_model(original := tmp_path / "made", {"pooling": "cls", "longest": 7})
    entries = json.loads((original / "modules.json").read_text(encoding="utf-8"))
    folder = tmp_path / "st"
    shutil.copytree(original, folder / "0_Transformer")
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling"):
        shutil.move(folder / "0_Transformer" / name, folder / name)
    (folder / "modules.json").write_text(json.dumps([{**entries[0], "path": "0_Transformer"}, *entries[1:]]))
    for number, path in enumerate((folder, folder / "0_Transformer")):
        small = (
            hs.load(path, device="cpu").remove("encoder-self.0.1", export="masked").save(tmp_path / f"{number}").path
        )
        value = hs.evaluate(small, TEXTS, against=folder, metrics="cosine", bootstrap=5)["cosine"].value
        assert value == pytest.approx(_cosines(folder, small, TEXTS), abs=1e-5)


def test_companions_of_all_kinds_are_copied(tmp_path: Path) -> None:
    """Files that headscope writes are not replaced."""
    _save_model(folder := tmp_path / "st", {})
    shutil.rmtree(folder / "1_Pooling")
    (folder / "modules.json").unlink()
    names = ("chat_template.jinja", "generation_config.json", "vocab.txt", "video_preprocessor_config.json")
    for name in (*names, "optimizer.bin", "trainer_state.json"):
        (folder / name).write_text("{}", encoding="utf-8")
    small = Path(hs.load(folder).remove("encoder-self.0.1").save(tmp_path / "small").path)
    assert all((small / name).is_file() for name in names)
    assert not (small / "optimizer.bin").exists() and not (small / "trainer_state.json").exists()
