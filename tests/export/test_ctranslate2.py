"""`--export ctranslate2`: translation models, run by CTranslate2 and compared with headscope's own translations."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headscope as hs
from headscope.assets import captions
from headscope.config import Companions
from headscope.config.commands import TranslateOptions
from headscope.errors import CheckpointError, ConfigError
from headscope.export.convert import convert
from headscope.formats.base import Checkpoint, open_checkpoint
from headscope.model.native.transformer import Transformer
from tests.makers import marian as makers
from tests.makers.removals import remove_heads
from tests.makers.shared import SHIPPED_FOLDER
from tests.makers.translators import WORDS, build_translator, randomize, with_decoder

pytestmark = pytest.mark.slow

ctranslate2 = pytest.importorskip("ctranslate2")

TEXTS = ["a@@ h b@@ i", "j k l m", "c@@ i unheard", "h"]


def proven_difference(checkpoint: Checkpoint, out: Path) -> float:
    """Convert a checkpoint and return the measured difference, which is below its limit."""
    conversion = convert(checkpoint, out, to="ctranslate2")
    assert conversion.difference is not None
    return conversion.difference


def load_engine(folder: Path) -> Any:
    return ctranslate2.Translator(str(folder / "ctranslate2"), device="cpu", compute_type="float32", intra_threads=1)


def pieces(text: str) -> list[str]:
    return [text_piece if text_piece in WORDS.subwords else "<unk>" for text_piece in text.split()]


def greedy(engine: Any, longest: int = 18) -> list[str]:
    """CTranslate2's greedy translations of `TEXTS`, without the padding that random models would generate."""
    results = engine.translate_batch(
        [pieces(text) for text in TEXTS], beam_size=1, max_decoding_length=longest, suppress_sequences=[["<pad>"]]
    )
    return [" ".join(result.hypotheses[0]) for result in results]


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "pre-norm, learned": {"norm": "pre", "positions": "learned", "activation": "gelu-tanh"},
    "untied, without positions": {"tie_output": False, "vocabulary": "separate", "positions": "none"},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_models_trained_here(tmp_path: Path, name: str) -> None:
    checkpoint = build_translator(**OPTIONS[name])
    assert proven_difference(checkpoint, tmp_path / "out") < 1e-5
    ours = checkpoint.translations(TEXTS, TranslateOptions(beam=1, max_len_a=0, max_len_b=18, keep_bpe=True))
    assert greedy(load_engine(tmp_path / "out")) == [translations[0].text for translations in ours]


def test_stacks_with_different_numbers_of_heads_that_do_not_fill_them(tmp_path: Path) -> None:
    config = build_translator().model.config
    assert config.encoder is not None
    decoder = replace(config.decoder, self_heads=(1, 1), cross_heads=(1, 1))
    model = randomize(Transformer(replace(config, encoder=replace(config.encoder, self_heads=(2, 2)), decoder=decoder)))
    assert proven_difference(model, tmp_path / "out") < 1e-5


def test_what_stands_before_the_first_layer_is_folded(tmp_path: Path) -> None:
    """With a bias and a projection of embeddings, an output projection, a zero start and another epsilon."""
    wide: dict[str, Any] = {"d_embedding": 7, "embedding_bias": True, "norm_epsilon": 1e-3}
    config = build_translator(tie_output=False, vocabulary="separate").model.config
    assert config.encoder is not None
    sides: dict[str, Any] = {
        side: replace(stack, **wide) for side, stack in (("encoder", config.encoder), ("decoder", config.decoder))
    }
    checkpoint = randomize(Transformer(replace(config, **sides, start="zero", d_output=5)))
    assert proven_difference(checkpoint, tmp_path / "out") < 1e-5


def test_the_forks_model_with_its_matrices_folded(tmp_path: Path) -> None:
    folder = SHIPPED_FOLDER / "mhr"
    companions = Companions(dicts=folder / "data")
    checkpoint = open_checkpoint(str(folder / "alpha" / "checkpoint_best.pt"), device="cpu", companions=companions)
    assert proven_difference(checkpoint, tmp_path / "out") < 1e-4
    lines = (folder / "data" / "test.bpe.de").read_text(encoding="utf-8").splitlines()[:8]
    ours = checkpoint.translations(lines, TranslateOptions(keep_bpe=True))
    results = load_engine(tmp_path / "out").translate_batch([line.split() for line in lines], beam_size=5)
    assert [" ".join(result.hypotheses[0]) for result in results] == [of_line[0].text for of_line in ours]


def test_the_model_of_story_of_heads(tmp_path: Path) -> None:
    """Its decoder starts with zeros, its embeddings have a bias, its norms another epsilon."""
    checkpoint = open_checkpoint(str(SHIPPED_FOLDER / "story-of-heads" / "model.npz"), device="cpu")
    assert proven_difference(checkpoint, tmp_path / "out") < 1e-4


@pytest.fixture(scope="module")
def uniform(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that ships without some heads, as many in every layer of a stack, for CTranslate2."""
    folder = tmp_path_factory.mktemp("uniform")
    heads = "encoder-self.*.1,encoder-self.*.4,decoder-self.*.2,cross.*.7"
    remove_heads(hs.assets.trained_model(), folder / "small", heads, export=("same", "ctranslate2"))
    return folder / "small"


@pytest.mark.parametrize("beam", [1, 4])
def test_captions_are_translated_as_headscope_does(uniform: Path, beam: int) -> None:
    """Words and scores equal those of the checkpoint in the same folder."""
    import sentencepiece

    checkpoint = open_checkpoint(str(uniform), device="cpu")
    texts = captions("en").read_text(encoding="utf-8").splitlines()[:16]
    ours = [of_text[0] for of_text in checkpoint.translations(texts, TranslateOptions(beam=beam, lenpen=1.0))]
    split = sentencepiece.SentencePieceProcessor(model_file=str(uniform / "ctranslate2" / "source.model"))
    sources = split.encode(texts, out_type=str)
    engine = load_engine(uniform)
    results = engine.translate_batch(sources, beam_size=beam, return_scores=True)
    lines = ["".join(result.hypotheses[0]).replace("▁", " ").strip() for result in results]
    assert lines == [translation.text for translation in ours]
    assert [result.scores[0] for result in results] == pytest.approx([entry.score for entry in ours], abs=1e-3)
    if beam == 1:  # CTranslate2 takes the end from what may come first, unless it may come at once
        exact = engine.translate_batch(sources, beam_size=1, return_scores=True, min_decoding_length=0)
        assert [result.scores[0] for result in exact] == pytest.approx([entry.score for entry in ours], abs=1e-5)


def marian(folder: Path, **sizes: Any) -> Path:
    shape: dict[str, Any] = {
        "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 20, "decoder_ffn_dim": 28,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 80,
    }  # fmt: skip
    model = makers.marian(folder, (200,), **shape | sizes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_positions" not in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.final_logits_bias.normal_()
        model.final_logits_bias[0, -1] = -50.0
    model.save_pretrained(folder)
    return folder


def test_a_marian_without_some_heads(tmp_path: Path) -> None:
    path = marian(tmp_path / "whole", scale_embedding=True, activation_function="swish")
    heads = "encoder-self.*.1,decoder-self.0.2,decoder-self.1.0,cross.*.3"
    (file,) = remove_heads(path, tmp_path / "small", heads, export=("self-contained", "ctranslate2")).engines
    assert file.difference is not None and file.limit is not None and file.difference <= file.limit
    assert (
        "3 heads in the encoder, 3 in the decoder" in file.sizes
        and "8 of 8 sentences the same greedily" in file.notes[0]
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "small" / "ctranslate2")
    text = "A man in a red shirt walks."
    results = load_engine(tmp_path / "small").translate_batch(
        [tokenizer.convert_ids_to_tokens(tokenizer(text)["input_ids"])], beam_size=1, max_decoding_length=9
    )
    small: Any = open_checkpoint(str(tmp_path / "small"), device="cpu")
    expected = small.model.generate(
        **tokenizer(text, return_tensors="pt"), num_beams=1, max_new_tokens=9, do_sample=False
    )
    assert results[0].hypotheses[0][:8] == tokenizer.convert_ids_to_tokens(expected[0, 1:9])


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: with_decoder(self_heads=(3, 2)), "3, 2, 3, 3.*--allocate uniform"),
        (lambda: with_decoder(activation="linear"), "linear"),
        (lambda: with_decoder(self_mixing="experts.v1"), "folded"),
        (lambda: build_translator(kind="lm"), "translation"),
        (lambda: randomize(build_translator().model, vocabulary=replace(WORDS, suffix=(2, 2))), "ids"),
    ],
)
def test_what_ctranslate2_has_not_is_one_line(tmp_path: Path, make: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        proven_difference(make(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_it_computes_differently_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctranslate2.specs.TransformerSpec, "validate", _double_projection)
    with pytest.raises(CheckpointError, match="CTranslate2"):
        proven_difference(build_translator(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _double_projection(spec: Any) -> None:
    spec.decoder.projection.weight = 2 * spec.decoder.projection.weight
    super(ctranslate2.specs.TransformerSpec, spec).validate()
