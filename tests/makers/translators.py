"""Small translation and language models with the options of `headscope train`, and random weights."""

from dataclasses import replace
from typing import Any

import torch

from headscope.assets import captions
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.transformer import Transformer
from headscope.training.architecture import fresh_config
from headscope.training.config import TrainConfig
from tests.makers import wrappers

PIECES = ("<unk>", "<s>", "</s>", "<pad>", *(f"{letter}@@" for letter in "abcdefg"), *"hijklm")
WORDS = Vocabulary(PIECES, Splitter("bpe"), start=1, end=2, unknown=0, pad=3)
"""Special ids in SentencePiece's order, which is not fairseq's."""


def build_translator(*, kind: Any = "translation", seed: int = 0, **options: Any) -> TransformerCheckpoint:
    """A model with the options of `headscope train`, small, with random weights."""
    torch.manual_seed(seed)
    files: dict[str, Any] = {"source": captions("en"), "target": captions("de") if kind == "translation" else None}
    sizes: dict[str, Any] = {"d_model": 12, "d_ffn": 10, "heads": 3, "encoder_layers": 2, "decoder_layers": 2}
    config = TrainConfig(kind=kind, **files, **{"max_length": 20, **sizes, **options})
    shape = fresh_config(config, None if kind == "lm" else WORDS, WORDS)
    return randomize(Transformer(shape), kind=kind)


def randomize(model: Transformer, kind: str = "translation", vocabulary: Vocabulary = WORDS) -> TransformerCheckpoint:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    model.tie()
    model.eval()
    source = None if kind == "lm" else vocabulary
    return wrappers.native(model, source, vocabulary)


def with_decoder(**decoder: Any) -> TransformerCheckpoint:
    config = build_translator().model.config
    return randomize(Transformer(replace(config, decoder=replace(config.decoder, **decoder))))
