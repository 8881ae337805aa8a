"""Small random models of transformers that classify texts, pairs of texts and words, and folders of them.

Their answers are asked for one text at a time, by the eager model alone, without padding and without headscope.
"""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import processors
from torch import Tensor

from tests.oracles import tiny

NAMES = ("bad", "fair", "good", "odd", "2")  # the last one's name is another's number
V = len(tiny.PIECES)
_IDS: dict[str, Any] = {"pad_token_id": tiny.PAD, "vocab_size": V, "id2label": dict(enumerate(NAMES))}
_BERT: dict[str, Any] = {"hidden_size": 15, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 11}


def _config(kind: str, *, labels: int) -> Any:
    ids = _IDS if labels == len(NAMES) else {**_IDS, "id2label": {n: f"LABEL_{n}" for n in range(labels)}}
    if kind == "distilbert":
        sizes: dict[str, Any] = {"dim": 15, "n_layers": 2, "n_heads": 3, "hidden_dim": 11}
        return transformers.DistilBertConfig(**ids, **sizes, max_position_embeddings=61)
    if kind == "roberta":
        return transformers.RobertaConfig(**ids, **_BERT, type_vocab_size=1, max_position_embeddings=61)
    if kind == "gpt2":
        return transformers.GPT2Config(**ids, n_embd=15, n_layer=2, n_head=3, n_positions=61)
    return transformers.BertConfig(**ids, **_BERT, max_position_embeddings=61)


CLASSES: dict[str, Any] = {
    "bert": transformers.BertForSequenceClassification,
    "distilbert": transformers.DistilBertForSequenceClassification,
    "roberta": transformers.RobertaForSequenceClassification,
    "gpt2": transformers.GPT2ForSequenceClassification,
    "bert-tags": transformers.BertForTokenClassification,
    "distilbert-tags": transformers.DistilBertForTokenClassification,
    "bert-encoder": transformers.BertModel,
}


def tokenizer(kind: str) -> Any:
    """WordPiece; pairs as BERT has them, with token types."""
    if kind.startswith("gpt2"):
        return tiny.tokenizer([], [])
    wordpiece = tiny.tokenizer([tiny.START], [tiny.END])
    wordpiece.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", tiny.START), ("[SEP]", tiny.END)],
    )
    return wordpiece


def model(kind: str, *, labels: int = len(NAMES), seed: int = 3) -> Any:
    """Random weights, wide enough apart that heads differ, in float64."""
    torch.manual_seed(seed)
    classifier = CLASSES[kind](_config(kind.partition("-")[0], labels=labels)).double().eval()
    with torch.no_grad():
        for parameter in classifier.parameters():
            parameter.normal_(std=0.4 if parameter.ndim > 1 else 0.1)
    return classifier


def folder(path: Path, kind: str, **options: Any) -> Path:
    """A checkpoint as transformers writes it."""
    classifier = model(kind, **options)
    classifier.save_pretrained(path)
    tokenizer(kind).save_pretrained(path)
    return path


def texts(count: int, seed: int = 1) -> list[str]:
    """Words of one to three subwords, some unknown; texts of different lengths."""
    rng = random.Random(seed)
    words = [*tiny.WORDS, *(f"{word}{letter}" for word in tiny.WORDS[:7] for letter in "ab"), "zzz"]
    return [" ".join(rng.choices(words, k=2 + rng.randrange(6))) for _ in range(count)]


def labels(count: int, seed: int = 2) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(len(NAMES)) for _ in range(count)]


def logits(model: Any, kind: str, text: str, second: str | None = None) -> Tensor:
    """The output of the model as transformers runs it, for one text: [classes] or [t tags]."""
    encoding = tokenizer(kind)(text, second, return_tensors="pt")
    if kind.partition("-")[0] in ("distilbert", "gpt2"):
        encoding.pop("token_type_ids", None)
    with torch.no_grad():
        output: Tensor = model(**encoding).logits[0]
    return output


def macro_f1(predictions: list[int], labels: list[int]) -> float:
    """By plain counting."""
    scores = []
    for label in {*predictions, *labels}:
        right = sum(a == b == label for a, b in zip(predictions, labels, strict=True))
        precision = right / predictions.count(label) if label in predictions else 0.0
        recall = right / labels.count(label) if label in labels else 0.0
        scores.append(2 * precision * recall / (precision + recall) if right else 0.0)
    return sum(scores) / len(scores)
