"""Checkpoints that evaluation and translation are tried on: small native and Hugging Face ones, and the MHR oracle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.native.beams import SearchConfig
from tests.makers import wrappers
from tests.oracles import native, tiny

SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
SOURCES = ["k a b f o", "a", "c c d g h l m n e", "b q r", "o p a s e", "unseen d"]
TARGETS = ["a b c", "d e f g k l", "h", "i j k a b", "c d n", "m unseen a"]


def words(size: int, letter: Callable[[int], str] = lambda number: chr(ord("a") + number - 4)) -> Vocabulary:
    """Special pieces, then single letters, or what stands for them."""
    pieces = (*SPECIAL, *map(letter, range(4, size)))
    return Vocabulary(pieces, Splitter("words"), start=2, end=2, unknown=3, pad=1, special=frozenset({0}))


def small(seed: int = 0, **options: Any) -> TransformerCheckpoint:
    """A native model of prime sizes in float64 that reads letters; its translations have at most 9 tokens."""
    model = native.model(seed, **options)
    encoder = model.config.encoder
    return wrappers.native(
        model, words(native.SOURCE) if encoder else None, words(native.TARGET), search=SearchConfig(beam=3, max_extra=8)
    )


def huggingface(kind: str) -> HuggingFaceCheckpoint:
    """A model of transformers with its task head, and the tokenizer of `oracles.tiny`."""
    sizes: dict[str, Any] = {**tiny.IDS, "vocab_size": len(tiny.PIECES)}
    torch.manual_seed(7)
    if kind in ("bert", "bert-without-head"):
        sizes |= {**tiny.SIZES, "hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3}
        config = transformers.BertConfig(**sizes)
        model: Any = transformers.BertForMaskedLM(config) if kind == "bert" else transformers.BertModel(config)
    elif kind == "gpt2":
        gpt2 = transformers.GPT2Config(**sizes, n_embd=15, n_layer=2, n_head=3, n_positions=61)
        model = transformers.GPT2LMHeadModel(gpt2)
    else:
        sizes |= {"d_model": 30, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 61}
        sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5}
        sizes |= {"encoder_ffn_dim": 17, "decoder_ffn_dim": 19, "init_std": 0.3}
        sizes |= {"decoder_start_token_id": tiny.END, "forced_eos_token_id": None}
        model = transformers.BartForConditionalGeneration(transformers.BartConfig(**sizes))
        model.generation_config.forced_eos_token_id = None
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0 if parameter.ndim > 1 else 1.0)
    tokenizer = tiny.tokenizer([] if kind in ("gpt2", "bart") else [tiny.START], [] if kind == "gpt2" else [tiny.END])
    return wrappers.hugging_face(model.double().eval(), tokenizer)


def save_model(folder: Path, kind: str) -> Path:
    """A folder with such a model, as transformers writes it."""
    checkpoint = huggingface(kind)
    checkpoint.model.save_pretrained(folder)
    checkpoint.tokenizer.save_pretrained(folder)
    return folder
