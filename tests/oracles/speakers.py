"""Small random models in float64 that predict words, what they should predict, and how they are asked, sentence by
sentence and without padding: independent of the package's batches, labels and objectives.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

from headscope.data.corpus import Corpus, Sentence
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.formats.base import Checkpoint
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.formats.transformer_checkpoint import TransformerCheckpoint
from headscope.model.interface import through_attend
from tests.makers import wrappers
from tests.oracles import native, tiny
from tests.oracles.tiny import END, IDS, MASK, PAD, PIECES, SIZES, START, T5_SIZES

V = len(PIECES)
TWO_LAYERS = {**SIZES, "num_hidden_layers": 2}


def bert(cls: Any = transformers.BertForMaskedLM) -> Any:
    sizes = {"hidden_size": 15, "num_attention_heads": 3, "pad_token_id": PAD, "num_labels": 7}
    return cls(transformers.BertConfig(**TWO_LAYERS, **sizes))


def _gpt2() -> Any:
    config = transformers.GPT2Config(vocab_size=V, n_embd=15, n_layer=2, n_head=3, n_positions=97, **IDS)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> Any:
    sizes = {"hidden_size": 42, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TWO_LAYERS, **sizes, **IDS))


def _t5() -> Any:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5_SIZES, num_layers=1, num_decoder_layers=2)
    )


def _marian() -> Any:
    sizes = {"vocab_size": V, "d_model": 30, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 97}
    sizes |= {"encoder_attention_heads": 3, "decoder_attention_heads": 5, "encoder_ffn_dim": 11, "decoder_ffn_dim": 17}
    ids = {"pad_token_id": PAD, "eos_token_id": END, "decoder_start_token_id": PAD, "forced_eos_token_id": None}
    return transformers.MarianMTModel(transformers.MarianConfig(**sizes, **ids))


@dataclass(frozen=True)
class Speaker:
    """A model's constructor, the ids around its texts, and its kind."""

    make: Callable[[], Any] | None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    two_sided: bool = False
    masked: bool = False
    direct: bool = False


SPEAKERS = {
    "bert": Speaker(bert, (START,), (END,), masked=True),
    "gpt2": Speaker(_gpt2, (START,), direct=True),
    "llama": Speaker(_llama, (START,), direct=True),
    "t5": Speaker(_t5, (), (END,), two_sided=True, direct=True),
    "marian": Speaker(_marian, (), (END,), two_sided=True),
    "native-pre": Speaker(None, (), (END,), two_sided=True, direct=True),
    "native-post": Speaker(None, (), (END,), two_sided=True),
}


@cache
def checkpoint(kind: str, seed: int = 3) -> Checkpoint:
    """A model with random weights, wide enough apart that heads differ."""
    speaker = SPEAKERS[kind]
    if speaker.make is None:
        return _native(kind, seed)
    return wrap_model(speaker.make, speaker, seed)


def wrap_model(make: Callable[[], Any], speaker: Speaker, seed: int = 3) -> HuggingFaceCheckpoint:
    """A transformers model with the tokenizer of a speaker."""
    torch.manual_seed(seed)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    tokenizer = tiny.tokenizer(list(speaker.before), list(speaker.after))
    return wrappers.hugging_face(model, tokenizer)


def _native(kind: str, seed: int) -> TransformerCheckpoint:
    options: dict[str, Any] = {"norm": "post"}
    if kind == "native-pre":
        options = {"norm": "pre", "final_norm": True, "self_mixing": "alpha.v1"}
        options |= {"model": {"d_output": 11, "output_bias": True}}
    model = native.model(seed, vocabulary=V, **options)
    words = Vocabulary(tuple(PIECES), Splitter(), start=START, end=END, unknown=1, pad=PAD)
    return wrappers.native(model, words, words, format="test")


def corpus(kind: str, *, count: int = 11, seed: int = 3) -> Corpus:
    """Sentences of pieces, so that every tokenizer agrees about them; unequal lengths."""
    rng = np.random.default_rng(seed)

    def line() -> str:
        return " ".join(rng.choice(tiny.WORDS, size=rng.integers(1, 8)))

    two_sided = SPEAKERS[kind].two_sided
    sentences = [Sentence(number, line(), line() if two_sided else None) for number in range(count)]
    return Corpus("tiny", count, "0" * 40, lambda: iter(sentences), has_target=two_sided)


@dataclass
class Example:
    """One sentence: ids of both sides, what is to be predicted {position: id}, which positions predict at all."""

    number: int
    source: list[int]
    target: list[int] | None
    labels: dict[int, int]
    positions: list[int]

    def logits(self, checkpoint: Checkpoint) -> Tensor:
        """The model's logits [t V] for this sentence alone."""
        model: Any = checkpoint.model
        source = torch.tensor([self.source])
        if isinstance(checkpoint, TransformerCheckpoint):
            output: Tensor = model(source, torch.tensor([self.target]))
            return output[0]
        target = {} if self.target is None else {"decoder_input_ids": torch.tensor([self.target])}
        with through_attend(model):
            return model(input_ids=source, **target).logits[0]

    def loss(self, checkpoint: Checkpoint) -> Tensor:
        """Σ -log p of the labels."""
        log_p = torch.log_softmax(self.logits(checkpoint), dim=-1)
        return -sum((log_p[position, label] for position, label in self.labels.items()), torch.zeros(()).double())


def make_example(kind: str, sentence: Sentence, *, hide: bool = True, seed: int = 1) -> Example:
    """The labelled example of a sentence; `hide`: masked language models see a share of the tokens masked."""
    speaker = SPEAKERS[kind]
    plain = [PIECES.index(word) for word in sentence.source.split()]
    source = [*speaker.before, *plain, *speaker.after]
    if speaker.two_sided:
        labels = [PIECES.index(word) for word in (sentence.target or "").split()] + [END]
        first = START if speaker.make is None else PAD
        return Example(sentence.number, source, [first, *labels[:-1]], dict(enumerate(labels)), [*range(len(labels))])
    if not speaker.masked:
        return Example(sentence.number, source, None, dict(enumerate(source[1:])), list(range(len(source))))
    positions = list(range(len(speaker.before), len(speaker.before) + len(plain)))
    count = max(1, round(0.15 * len(plain)))
    hidden = sorted(np.random.default_rng([seed, sentence.number]).permutation(positions)[:count].tolist())
    inputs = [MASK if hide and position in hidden else token for position, token in enumerate(source)]
    return Example(sentence.number, inputs, None, {position: source[position] for position in hidden}, positions)
