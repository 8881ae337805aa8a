"""Small random models in float64 with a tokenizer and a corpus: what the analyses are tried on.

Sizes are different primes where the architecture allows it. Sentences are made of words of one to three
pieces, some unknown, and come with parses whose tokens are now and then smaller than a piece.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from headscope.data.corpus import Corpus, Sentence
from headscope.data.parses import Parse, Relation, Token
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.heads import Site, SiteLayer
from headscope.model.taps import capture
from tests.makers import wrappers
from tests.oracles import syntactic
from tests.oracles.trace import Call, Trace

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNKNOWN, START, END, MASK = range(5)
LETTERS = "abcdefghijklmnopq"  # 17
WORDS = [first + second for first in "abcdefg" for second in LETTERS[7:12]]  # 35 words of one piece
PIECES = [*SPECIAL, *WORDS, *(f"##{letter}" for letter in LETTERS[:13])]  # 53
RELATIONS = ("nsubj", "obj", "amod", "advmod", "det")
WINDOW = 5


def tokenizer(before: list[int], after: list[int]) -> Any:
    """WordPiece over `PIECES`, with special ids before and after every sentence."""
    backend = Tokenizer(models.WordPiece({piece: i for i, piece in enumerate(PIECES)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if before or after:
        parts = [SPECIAL[number] for number in before], [SPECIAL[number] for number in after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*parts[0], "$A", *parts[1]],
            special_tokens=[(SPECIAL[number], number) for number in {*before, *after}],
        )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **names)


IDS = {"pad_token_id": PAD, "bos_token_id": START, "eos_token_id": END}
SIZES = {"vocab_size": 53, "intermediate_size": 11, "max_position_embeddings": 97}
T5_SIZES = {"vocab_size": 53, "d_model": 13, "d_kv": 5, "d_ff": 11, "num_heads": 3, "pad_token_id": PAD}
T5_SIZES |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 17}
T5_SIZES |= {"eos_token_id": END, "decoder_start_token_id": PAD}
SLIDING = {**SIZES, **IDS, "num_hidden_layers": 3, "num_key_value_heads": 2, "sliding_window": WINDOW}


def _bert(heads: int = 3) -> Any:
    sizes = {"hidden_size": 5 * heads, "num_hidden_layers": 2, "num_attention_heads": heads}
    return transformers.BertModel(transformers.BertConfig(**SIZES, **sizes))


def _mistral() -> Any:
    sizes = {"hidden_size": 13, "num_attention_heads": 6, "head_dim": 10}
    return transformers.MistralModel(transformers.MistralConfig(**SLIDING, **sizes))


def _gemma() -> Any:
    """Layers with and without a sliding window in turn; soft caps."""
    sizes = {"hidden_size": 20, "num_attention_heads": 4, "head_dim": 6}
    return transformers.Gemma2Model(transformers.Gemma2Config(**SLIDING, **sizes))


def _t5() -> Any:
    return transformers.T5Model(transformers.T5Config(**T5_SIZES, num_layers=2, num_decoder_layers=3))


@dataclass(frozen=True)
class Kind:
    """A tiny model's constructor, and what the oracles must know about it."""

    make: Any
    before: list[int]
    after: list[int]
    two_sided: bool = False
    has_window: Callable[[int], bool] = lambda layer: False


KINDS = {
    "bert": Kind(_bert, [START], [END]),
    "mistral": Kind(_mistral, [START], [], has_window=lambda layer: True),
    "gemma": Kind(_gemma, [START], [], has_window=lambda layer: layer % 2 == 0),
    "t5": Kind(_t5, [], [END], two_sided=True),
    "single": Kind(lambda: _bert(1), [START], [END]),
}


def checkpoint(kind: str, seed: int) -> HuggingFaceCheckpoint:
    """A model with random weights, wide enough apart that heads differ and few of them are uniform."""
    torch.manual_seed(seed)
    spec = KINDS[kind]
    model = spec.make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.5)
            elif parameter.abs().max() == 0:
                parameter.normal_(std=0.1)
    return wrappers.hugging_face(model, tokenizer(spec.before, spec.after))


def corpus(seed: int, *, count: int = 19, target: bool = False) -> Corpus:
    """Sentences of 1 to 13 words with parses, the first one a single word; `target` adds translations."""
    rng = random.Random(seed)
    sentences = []
    for number in range(count):
        words = [_word(rng) for _ in range(1 if number == 0 else rng.randint(1, 13))]
        if number % 7 == 3:
            words[rng.randrange(len(words))] = "ŵŵ"  # unknown
        if len(words) > 4:
            words[3] = words[1]  # a token that comes twice
        other = " ".join(_word(rng) for _ in range(rng.randint(1, 11))) if target else None
        sentences.append(Sentence(number, " ".join(words), other, _parse(words, rng)))
    return Corpus("tiny", count, "0" * 40, lambda: iter(sentences), has_target=target, has_parses=True)


def _word(rng: random.Random) -> str:
    return rng.choice(WORDS) + "".join(rng.choice(LETTERS[:13]) for _ in range(rng.choice([0, 0, 1, 2])))


def _parse(words: list[str], rng: random.Random) -> Parse:
    """Tokens are words; some are cut in the middle of their first piece, some between pieces."""
    tokens, offset = [], 0
    for word in words:
        cuts = [0, len(word)]
        if rng.random() < 0.3:
            cuts.insert(1, rng.randrange(1, len(word)))
        tokens += [Token(offset + a, offset + b) for a, b in pairwise(cuts)]
        offset += len(word) + 1
    relations = []
    for dependent in range(len(tokens)):
        head = rng.randrange(len(tokens))
        if head != dependent:
            relations.append(Relation(rng.choice(RELATIONS), head, dependent))
    return Parse(" ".join(words), tuple(tokens), tuple(relations))


def trace_sentence(kind: str, checkpoint: HuggingFaceCheckpoint, sentence: Sentence) -> Trace:
    """One sentence through the model, alone; ids, special tokens, words and visibility from first principles."""
    spec = KINDS[kind]
    plain = checkpoint.tokenizer(sentence.source, add_special_tokens=False, return_offsets_mapping=True)
    ids = [*spec.before, *plain["input_ids"], *spec.after]
    trace = Trace(sentence.number, ids, [number in (PAD, START, END, MASK) for number in ids])
    if sentence.target is not None:
        labels = [*checkpoint.tokenizer(sentence.target, add_special_tokens=False)["input_ids"], *spec.after]
        trace.target = [PAD, *labels[:-1]]
        trace.target_special = [index == 0 for index in range(len(labels))]
    if sentence.parse is not None:
        before = len(spec.before)
        spans = [None] * before + [tuple(span) for span in plain["offset_mapping"]]
        tokens = [(token.start, token.end) for token in sentence.parse.tokens]
        trace.units, unit_of = syntactic.units(tokens, spans)
        edges = [(r.relation, r.head, r.dependent) for r in sentence.parse.relations]
        trace.relations = syntactic.relations(edges, unit_of)
    return fill_calls(kind, checkpoint, trace)


def fill_calls(kind: str, checkpoint: HuggingFaceCheckpoint, trace: Trace) -> Trace:
    """Fill in the calls of a sentence (capture is compared with transformers' own weights elsewhere)."""
    inputs = {"input_ids": torch.tensor([trace.source])}
    if trace.target is not None:
        inputs["decoder_input_ids"] = torch.tensor([trace.target])
    with torch.no_grad(), capture(checkpoint.model, ("weights", "context")) as record:
        checkpoint.model(**inputs, use_cache=False)
    trace.tie = 1e-12 if checkpoint.dtype is torch.float64 else 2.5e-7
    for site_layer in checkpoint.layout:
        weights, context = (_precise(record[site_layer][name][0]) for name in ("weights", "context"))
        trace.calls[site_layer] = Call(weights, context, _visible(KINDS[kind], site_layer, *weights.shape[1:]))
    return trace


def _precise(values: torch.Tensor) -> np.ndarray:
    return (values.float() if values.element_size() < 4 else values).numpy()


def _visible(spec: Kind, site_layer: SiteLayer, queries: int, keys: int) -> np.ndarray:
    t, s = np.arange(queries)[:, None], np.arange(keys)[None]
    if site_layer[0] is not Site.DECODER_SELF:
        return np.ones((queries, keys), dtype=bool)
    beyond = spec.has_window(site_layer[1]) & (t - s >= WINDOW)
    return (s <= t) & ~beyond
