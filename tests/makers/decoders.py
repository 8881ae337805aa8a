"""Tiny causal language models with tokenizers, as llama.cpp and others run them."""

from itertools import islice
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from headscope.assets import sample
from headscope.files.reading import read_lines

VOCABULARY = 320
SPECIAL = ["<unk>", "<s>", "</s>"]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
UNIFORM = "decoder-self.0.0,decoder-self.0.1,decoder-self.1.4,decoder-self.1.5,decoder-self.2.2,decoder-self.2.3"
"""A group of every layer."""
PER_GROUP = (
    "decoder-self.0.0,decoder-self.0.3,decoder-self.0.5,decoder-self.0.6,"
    "decoder-self.2.1,decoder-self.2.2,decoder-self.2.4,decoder-self.2.7"
)
"""One head of each group in two of three layers."""
RAGGED = (
    "decoder-self.0.2,decoder-self.0.3,decoder-self.0.6,decoder-self.0.7,decoder-self.1.*,"
    "decoder-self.2.0,decoder-self.2.3,decoder-self.2.4,decoder-self.2.7"
)
"""Whole groups; a whole layer; one head of each group."""
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def decoder(kind: str, **more: Any) -> Any:
    """A random model of 8 heads of width 16 in 4 groups (qwen2: on width 128), with sharp attention."""
    torch.manual_seed(7)
    name = CLASSES[kind]
    sizes = {
        "hidden_size": 128 if kind == "qwen2" else 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **({} if kind == "qwen2" else {"head_dim": 16}),
    }
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**sizes | more))
    with torch.no_grad():
        for key, values in model.named_parameters():
            if "norm" in key or "bias" in key:
                values.uniform_(0.5, 1.5) if "norm" in key else values.uniform_(-0.5, 0.5)
    return model.eval()


def save_decoder(folder: Path, kind: str = "llama", *, tokenizer: Any = None, **more: Any) -> Path:
    """A folder with such a model."""
    decoder(kind, **more).save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def byte_level(split: str = "") -> Any:
    """BPE over bytes, after a split as GPT-2's, or by a regular expression, of the sample's words."""
    inner = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    if split:
        steps.insert(0, pre_tokenizers.Split(Regex(split), behavior="isolated"))
    inner.pre_tokenizer = pre_tokenizers.Sequence(steps) if split else steps[0]
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options: dict[str, Any] = {"vocab_size": VOCABULARY, "special_tokens": SPECIAL, "initial_alphabet": alphabet}
    trainer = trainers.BpeTrainer(**options, show_progress=False)
    inner.train_from_iterator(list(islice(read_lines(sample("en")), 200)), trainer)
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **names)
