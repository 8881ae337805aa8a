"""Conversions: what is written gives the same logits in the program that reads it, or nothing is written."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from headscope.config import Companions
from headscope.errors import CheckpointError
from headscope.export.convert import convert
from headscope.formats.base import open_checkpoint
from headscope.formats.huggingface import from_native as tohf
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.heads import HeadId, Site
from headscope.model.native.transformer import folded_weights
from headscope.model.removal_plan import plan_removal
from tests.makers.fairseq_layouts import PRE, PREVIOUS, SOURCE, TIED
from tests.makers.translators import WORDS, build_translator, randomize, with_decoder
from tests.oracles import fairseq

LEARNED_POSITIONS = {"encoder_learned_pos": True, "decoder_learned_pos": True, "max_target_positions": 31}
SHARED = {"share_all_embeddings": True}
NORM = {"layernorm_embedding": True}
# The class that expresses each model, and options of fairseq models that only it expresses.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "FSMT, tied": ("FSMTForConditionalGeneration", TIED),
    "FSMT, untied": ("FSMTForConditionalGeneration", {"activation_fn": "gelu", "no_scale_embedding": True}),
    "FSMT, all shared": ("FSMTForConditionalGeneration", SHARED),
    "M2M100, all shared": ("M2M100ForConditionalGeneration", PRE | SHARED | {"activation_fn": "gelu_fast"}),
    "BART, learned": ("BartForConditionalGeneration", SHARED | NORM | LEARNED_POSITIONS | {"no_scale_embedding": True}),
    "BART, sinusoids": ("BartForConditionalGeneration", SHARED | NORM),
    "MBART, learned": ("MBartForConditionalGeneration", PRE | SHARED | NORM | LEARNED_POSITIONS),
}
LMS: dict[str, tuple[str, dict[str, Any]]] = {
    "OPT, sinusoids, tied": ("OPTForCausalLM", TIED),
    "OPT, sinusoids": ("OPTForCausalLM", {"activation_fn": "gelu"}),
    "OPT": ("OPTForCausalLM", {"decoder_learned_pos": True, "no_scale_embedding": True}),
    "OPT, tied": ("OPTForCausalLM", TIED | {"decoder_learned_pos": True, "no_scale_embedding": True}),
    "OPT, scaled": ("OPTForCausalLM", {"decoder_learned_pos": True, "activation_fn": "gelu"}),
}
HEADS = {f"{side}_attention_heads": heads for side, heads in (("encoder", 3), ("decoder", 2))}
MODELS = {name: (cls, fairseq.BASE | HEADS | more) for name, (cls, more) in CLASSES.items()}
MODELS |= {name: (cls, fairseq.LM | more) for name, (cls, more) in LMS.items()}


def load(path: Path, *, dtype: str = "float64", **options: Any) -> TransformerCheckpoint:
    checkpoint = open_checkpoint(str(path), device="cpu", dtype=dtype, **options)
    assert isinstance(checkpoint, TransformerCheckpoint)
    return checkpoint


def write_file(folder: Path, options: dict[str, Any], **more: Any) -> Path:
    """A fairseq checkpoint with its dictionaries beside it."""
    if options.get("share_all_embeddings"):
        fairseq.dictionaries(folder)
        text = (folder / "dict.en.txt").read_text(encoding="utf-8")
        (folder / "dict.de.txt").write_text(text, encoding="utf-8")
    else:
        fairseq.dictionaries(folder, alone=fairseq.is_lm(options))
    return fairseq.write(folder / "c.pt", options, fairseq.state(options, **more))


def hf_logits(folder: Path, *, two_sided: bool, dtype: torch.dtype) -> torch.Tensor:
    """The logits of a folder in transformers, without headscope."""
    auto = transformers.AutoModelForSeq2SeqLM if two_sided else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=dtype).eval()
    previous = torch.tensor([PREVIOUS])
    inputs = {"input_ids": torch.tensor([[*(number % 19 for number in SOURCE[:-1]), 2]]), "decoder_input_ids": previous}
    with torch.no_grad():
        logits: torch.Tensor = model(**(inputs if two_sided else {"input_ids": previous}), use_cache=False).logits
    return logits[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_transformers_alone_gives_the_same_logits(tmp_path: Path, name: str) -> None:
    architecture, options = MODELS[name]
    weights = fairseq.state(options)
    conversion = convert(load(write_file(tmp_path / "in", options)), tmp_path / "out", to="huggingface")
    assert (conversion.architecture, conversion.record["to"]) == (architecture, "huggingface")
    two_sided = not fairseq.is_lm(options)
    dtype = torch.float32 if architecture.startswith("FSMT") else torch.float64  # it fails in double precision
    actual = hf_logits(tmp_path / "out", two_sided=two_sided, dtype=dtype)
    source = [*(number % 19 for number in SOURCE[:-1]), 2] if two_sided else None
    expected = fairseq.logits(options, weights, source, PREVIOUS)
    # transformers keeps sinusoids in single precision
    exact = "learned" in name or name.startswith("OPT")
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=1e-8 if exact else 2e-5)
    assert conversion.difference is not None and conversion.difference < (1e-8 if exact else 1e-5)


def test_matrices_that_mix_heads_are_folded(tmp_path: Path) -> None:
    options = fairseq.BASE | TIED
    checkpoint = load(write_file(tmp_path / "in", options, alphas=("all",)), dtype="auto")
    conversion = convert(checkpoint, tmp_path / "out", to="huggingface")
    assert "folded into the output projections" in conversion.notes[1]
    assert "analyse the original" in conversion.notes[2]
    with torch.no_grad():
        ours = checkpoint.model(torch.tensor([[*(n % 19 for n in SOURCE[:-1]), 2]]), torch.tensor([PREVIOUS]))[0]
    logits = hf_logits(tmp_path / "out", two_sided=True, dtype=torch.float32)
    torch.testing.assert_close(logits, ours, rtol=0, atol=2e-5)
    assert json.loads((tmp_path / "out" / "source.pieces.json").read_text())[4] == "a@@"


def test_a_language_model_gets_a_tokenizer(tmp_path: Path) -> None:
    convert(load(write_file(tmp_path / "in", MODELS["OPT, sinusoids, tied"][1])), tmp_path / "out", to="huggingface")
    copy = open_checkpoint(str(tmp_path / "out"), device="cpu")
    assert copy.encode(["a@@ c"], side="source", limit=9)[0].ids == [2, 4, 6]
    assert not copy.two_sided


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (PRE, "M2M100ForConditionalGeneration.*vocabulary"),
        (LEARNED_POSITIONS, "FSMT.*positions"),
        (PRE | SHARED | {"no_decoder_final_norm": True}, "norm"),
        ({"encoder_normalize_before": True}, "norm"),
        ({"decoder_output_dim": 10}, "d_output"),
        ({"decoder_input_dim": 10}, "d_embedding"),
        ({"no_token_positional_embeddings": True}, "positions"),
        ({"decoder_embed_dim": 9}, "d_model"),
        ({"encoder_learned_pos": True, "decoder_learned_pos": True} | SHARED | NORM, "max_positions"),
    ],
)
def test_what_transformers_cannot_express_is_named(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    settings = fairseq.BASE | options
    with pytest.raises(CheckpointError, match=f"{reason}"):
        convert(load(write_file(tmp_path / "in", settings)), tmp_path / "out", to="huggingface")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


def test_what_differs_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = MODELS["M2M100, all shared"][1]
    checkpoint = load(write_file(tmp_path / "in", options))

    def shift_weights(model: Any) -> Any:
        state = folded_weights(model)
        return state | {"encoder.norm.bias": state["encoder.norm.bias"] + 0.01}

    monkeypatch.setattr(tohf, "folded_weights", shift_weights)
    with pytest.raises(CheckpointError):
        convert(checkpoint, tmp_path / "out", to="huggingface")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.slow
def test_the_forks_checkpoint_in_transformers(oracles: Path, tmp_path: Path) -> None:
    """The folder, with alphas folded into output projections, gives the logits and translations of the fork."""
    folder = oracles / "mhr"
    checkpoint = load(
        folder / "alpha" / "checkpoint_best.pt", dtype="auto", companions=Companions(dicts=folder / "data")
    )
    conversion = convert(checkpoint, tmp_path / "out", to="huggingface")
    model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out").eval()
    assert not any("alpha" in name for name in model.state_dict())
    reference = np.load(folder / "alpha" / "oracle" / "tf_logits.npz")
    lines = (folder / "data" / "test.bpe.de").read_text(encoding="utf-8").splitlines()[:4]
    ids = [encoding.ids for encoding in checkpoint.encode(lines, side="source", limit=99)]
    assert checkpoint.target is not None
    with torch.no_grad():
        for n, (line, row) in enumerate(zip(lines, ids, strict=True)):
            batch = torch.tensor([row]), torch.from_numpy(reference[f"prev_{n}"])[None]
            logits = model(input_ids=batch[0], decoder_input_ids=batch[1], use_cache=False).logits[0]
            np.testing.assert_allclose(logits.numpy(), reference[f"logits_{n}"], rtol=0, atol=1e-5)
            ours = checkpoint.translate([line])[0][0]
            inputs = torch.tensor([row]), torch.tensor([[2, *ours.ids[:-1]]])
            theirs = model(input_ids=inputs[0], decoder_input_ids=inputs[1], use_cache=False).logits
            torch.testing.assert_close(theirs, checkpoint.model(*inputs), rtol=0, atol=1e-5)
            output = model.generate(inputs[0])[0].tolist()
            assert checkpoint.target.decode(output) == checkpoint.target.decode(ours.ids)
    assert conversion.difference is not None and conversion.difference < 1e-5


# To fairseq: the keys, shapes and weights that it and its fork write, and the same logits.


def contents(path: Path) -> dict[str, Any]:
    """The content of a fairseq file, read by torch."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        content: dict[str, Any] = torch.load(path, weights_only=True)
    return content


def options_and_weights(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Options and weights of the file that was written."""
    content = contents(folder / "checkpoint_best.pt")
    assert content["optimizer_history"][-1]["num_updates"] == 0  # fairseq looks these up when it opens a file
    assert content["extra_state"]["train_iterator"]["epoch"] == 1
    return vars(content["args"]), content["model"]


@pytest.mark.slow
def test_the_forks_own_file_comes_back(oracles: Path, tmp_path: Path) -> None:
    """After a conversion to a native model and back: the same keys, order, shapes, types, values and options."""
    folder = oracles / "mhr"
    path = folder / "alpha" / "checkpoint_best.pt"
    original = load(path, dtype="auto", companions=Companions(dicts=folder / "data"))
    convert(original, tmp_path / "native", to="native")
    conversion = convert(load(tmp_path / "native", dtype="auto"), tmp_path / "back", to="fairseq")
    assert conversion.difference == 0.0 and "alphas" in conversion.notes[0]
    content = contents(path)
    state, (options, weights) = content["model"], options_and_weights(tmp_path / "back")
    assert list(weights) == list(state)
    for key, tensor in weights.items():
        assert tensor.shape == state[key].shape and tensor.dtype == state[key].dtype
        assert key.endswith("_float_tensor") or torch.equal(tensor, state[key]), key
    theirs = vars(content["args"])
    names = {name for name in options if name.startswith(("encoder_", "decoder_", "share_", "max_", "no_", "left_"))}
    assert names and {name: options[name] for name in names - {"encoder_embed_path", "decoder_embed_path"}} == {
        name: theirs[name] for name in names - {"encoder_embed_path", "decoder_embed_path"}
    }
    for side, language in (("source", "de"), ("target", "en")):
        lines = (tmp_path / "back" / f"dict.{side}.txt").read_text(encoding="utf-8").splitlines()
        expected = (folder / "data" / f"dict.{language}.txt").read_text(encoding="utf-8").splitlines()
        assert [line.split()[0] for line in lines] == [line.split()[0] for line in expected]


def test_a_file_of_fairseq_is_written_again(tmp_path: Path) -> None:
    fairseq.dictionaries(tmp_path)
    weights = fairseq.state(fairseq.BASE)
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, weights)
    conversion = convert(load(path, dtype="auto"), tmp_path / "out", to="fairseq")
    copy = contents(tmp_path / "out" / "c.pt")
    assert conversion.difference == 0.0 and list(copy["model"]) == list(weights)
    assert all(torch.equal(copy["model"][key], weights[key]) for key in weights)
    names = sorted(file.name for file in (tmp_path / "out").iterdir())
    assert names == ["README.md", "c.pt", "conversion.json", "dict.de.txt", "dict.en.txt"]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pre-norm, learned": {"norm": "pre", "positions": "learned", "activation": "gelu-tanh"},
    "untied, two vocabularies": {"tie_output": False, "vocabulary": "separate", "positions": "none"},
    "a language model": {"kind": "lm", "norm": "pre"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_models_trained_here_give_the_same_logits_in_fairseqs_formulas(tmp_path: Path, name: str) -> None:
    """The oracle takes ids, start and positions from the file alone."""
    checkpoint = build_translator(**OPTIONS[name])
    conversion = convert(checkpoint, tmp_path / "out", to="fairseq")
    assert conversion.difference is not None and conversion.difference < 1e-6
    options, weights = options_and_weights(tmp_path / "out")
    subwords = ["<s>", "<pad>", "</s>", "<unk>", *WORDS.subwords[4:]]
    lm = checkpoint.source is None
    lines = (tmp_path / "out" / ("dict.txt" if lm else "dict.target.txt")).read_text().splitlines()
    assert [line.split()[0] for line in lines] == subwords[4:]
    ids = [WORDS.subwords.index(subword) for subword in subwords]  # ours, in fairseq's order
    text, source = [5, 14, 0, 9], [7, 0, 16, 8, 2]
    theirs = [ids.index(number) for number in text]
    before = [0] if lm else [2]
    actual = fairseq.logits(options, weights, None if lm else [ids.index(n) for n in source], before + theirs)
    with torch.no_grad():
        target = torch.tensor([[1, *text]])
        expected = checkpoint.model.double()(None if lm else torch.tensor([source]), target)[0]
    torch.testing.assert_close(actual, expected[:, ids], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: build_translator(kind="lm"), "post-norm"),
        (lambda: with_decoder(d_head=5), "width"),
        (lambda: with_decoder(self_heads=(3, 2)), "--export masked"),
        (lambda: with_decoder(norm_epsilon=1e-6), "epsilon"),
        (lambda: with_decoder(self_mixing="experts.v1"), "mixed"),
        (lambda: randomize(build_translator().model, vocabulary=replace(WORDS, pad=None)), "<pad>"),
    ],
)
def test_what_fairseq_has_not_is_one_line(tmp_path: Path, make: Any, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"{reason}"):
        convert(make(), tmp_path / "out", to="fairseq")
    assert not (tmp_path / "out").exists()


def test_a_pruned_file_is_refused_and_a_masked_one_is_not(tmp_path: Path) -> None:
    path = fairseq.write(tmp_path / "c.pt", fairseq.BASE, fairseq.state(fairseq.BASE))
    fairseq.dictionaries(tmp_path)
    checkpoint = load(path, dtype="auto")
    plan = plan_removal(checkpoint.attention_sites, [HeadId(Site.CROSS, 0, 1)])
    with pytest.raises(CheckpointError, match="--export masked"):
        convert(checkpoint.alter_heads(plan, "shrink"), tmp_path / "out", to="fairseq")
    masked = checkpoint.alter_heads(plan, "zero")
    assert convert(masked, tmp_path / "out", to="fairseq").difference == 0.0
