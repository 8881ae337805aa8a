"""From text files to ids and vocabularies, and batches of them: sorted by length, cut by tokens, shuffled by seed.

Text is normalised, then split into subwords by a SentencePiece model, learnt or read from a file.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import (
    IGNORED,
    SIDE_NAMES,
    Batch,
    Encoded,
    Side,
    SideName,
    UnknownSubwords,
    groups,
    pad_rows,
    pad_side,
)
from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.distributed import Processes
from headscope.errors import ConfigError, DataError, flag, restate
from headscope.files.reading import read_bytes
from headscope.files.writing import write_atomically
from headscope.formats.diagnosis import STATE
from headscope.training.config import Normalise, TrainConfig

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedTexts:
    """Id sequences one after another: text i is `ids[bounds[i]:bounds[i + 1]]`."""

    ids: Ids
    bounds: Numbers

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> TokenizedTexts:
        """From lists of ids."""
        bounds = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        flat = np.fromiter((number for text in texts for number in text), dtype=np.int32, count=int(bounds[-1]))
        return cls(flat, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.ids[self.bounds[number] : self.bounds[number + 1]]

    @property
    def lengths(self) -> Numbers:
        """Number of ids of every text."""
        return np.diff(self.bounds)


@dataclass(frozen=True)
class TrainingPairs:
    """Training pairs: encoder inputs (None for language models) and texts that the decoder must predict.

    Neither holds special ids yet: encoder inputs get `prefix` and `suffix` of their vocabulary, decoder inputs begin
    with `start`, labels end with `end` where texts have ends. `numbers` are those of the sentences in their file.
    """

    source: TokenizedTexts | None
    target: TokenizedTexts
    numbers: Numbers
    source_vocabulary: Vocabulary | None
    target_vocabulary: Vocabulary
    has_ends: bool = True

    def __len__(self) -> int:
        return len(self.target)

    def lengths(self) -> tuple[Numbers, Numbers]:
        """Positions that every pair takes on either side."""
        target, vocabulary = self.target.lengths + int(self.has_ends), self.source_vocabulary
        if self.source is None or vocabulary is None:
            return target, target
        return self.source.lengths + len(vocabulary.prefix) + len(vocabulary.closing), target


def plan_lengths(source: Numbers, target: Numbers, *, tokens: int, chance: np.random.Generator | None) -> list[Numbers]:
    """Batches of sentences of similar length; `chance` shuffles ties and batches (None: both in order)."""
    order = np.arange(len(target)) if chance is None else chance.permutation(len(target))
    order = order[np.argsort(source[order], kind="stable")]
    order = order[np.argsort(target[order], kind="stable")]
    batches = [np.array(group) for group in groups(order.tolist(), np.maximum(source, target).__getitem__, tokens)]
    return batches if chance is None else [batches[number] for number in chance.permutation(len(batches))]


def epoch_plan(pairs: TrainingPairs, *, tokens: int, seed: int, epoch: int) -> list[Numbers]:
    """The batches of an epoch: the same for the same seed and epoch, whatever came before."""
    return plan_lengths(*pairs.lengths(), tokens=tokens, chance=np.random.default_rng([seed, epoch]))


def collate(pairs: TrainingPairs, numbers: Numbers) -> Batch:
    """The batch of some sentences, with labels; the texts of a language model are its source."""
    source_vocabulary, vocabulary = pairs.source_vocabulary, pairs.target_vocabulary
    target_ids = [pairs.target[int(number)] for number in numbers]
    labels = [np.append(ids, vocabulary.end) for ids in target_ids] if pairs.has_ends else target_ids
    text = _side([np.insert(ids[:-1], 0, vocabulary.start) for ids in labels], vocabulary)
    source, target = text, None
    if pairs.source is not None and source_vocabulary is not None:
        prefix, closing = source_vocabulary.prefix, source_vocabulary.closing
        source_ids = [np.concatenate([prefix, pairs.source[int(n)], closing]) for n in numbers]
        source, target = _side(source_ids, source_vocabulary), text
    label_rows = pad_rows([row.tolist() for row in labels], IGNORED)
    return Batch(torch.from_numpy(pairs.numbers[numbers]), 0, source, target, labels=label_rows)


def without_labels(batch: Batch) -> Batch:
    """The batch without sentence numbers and with every label ignored, for a process that has no batch left."""
    assert batch.labels is not None
    return replace(batch, indices=batch.indices[:0], labels=torch.full_like(batch.labels, IGNORED))


def _side(rows: Sequence[npt.NDArray[Any]], vocabulary: Vocabulary) -> Side:
    special = [*vocabulary.special_ids]
    encodings = [Encoded(row.tolist(), np.isin(row, special).tolist()) for row in rows]
    return pad_side(encodings, pad=vocabulary.padding)


FOLDER = "data"


@dataclass(frozen=True)
class Prepared:
    """Prepared training data: ids of both sides, their vocabularies, and the validation text for BLEU.

    `n_dropped` training sentences were longer than `--max-length`; `digest` is of texts, vocabularies and settings.
    """

    train: TrainingPairs
    valid: TrainingPairs | None
    source: Vocabulary | None
    target: Vocabulary
    valid_texts: tuple[list[str], list[str]] | None
    n_dropped: int
    digest: str

    @property
    def unknown(self) -> UnknownSubwords:
        """Pieces of the training text, and how many of them the vocabularies do not have."""
        counts = UnknownSubwords()
        sides: list[tuple[SideName, Vocabulary | None, TokenizedTexts | None]] = [
            ("source", self.source, self.train.source),
            ("target", self.target, self.train.target),
        ]
        for side, vocabulary, texts in sides:
            if vocabulary is not None and texts is not None:
                counts.read[side] = len(texts.ids)
                counts.unknown[side] = 0 if vocabulary.unknown is None else int((texts.ids == vocabulary.unknown).sum())
        return counts


def learn_vocabularies(config: TrainConfig, corpus: Corpus) -> tuple[Vocabulary | None, Vocabulary]:
    """The vocabularies of source (None for language models) and target, from `--tokenizer` or the training text."""
    if config.tokenizer is not None:
        codes = read_bytes(config.tokenizer, name=f"{flag.tokenizer} {config.tokenizer}")
        with restate(DataError, f"{flag.tokenizer} {config.tokenizer}: {{why}}", DataError):
            vocabulary = vocabulary_of(codes)
        return (None if config.kind == "lm" else vocabulary), vocabulary
    learn = partial(learn_vocabulary, size=config.vocab_size, kind=config.tokenizer_kind, normalise=config.normalise)
    if config.kind == "lm":
        return None, learn(_lines(config, corpus, "source"))
    sources, targets = (_lines(config, corpus, side) for side in SIDE_NAMES)
    if config.vocabulary == "separate":
        return learn(sources), learn(targets)
    vocabulary = learn(chain(sources, targets))
    return vocabulary, vocabulary


def vocabulary_codes(config: TrainConfig, corpus: Corpus) -> tuple[bytes, bytes]:
    """SentencePiece models of source (empty for a language model) and target: from the run's folder, else new ones."""
    files = [config.out / FOLDER / f"{name}.model" for name in ("source", "target")]
    if (config.out / STATE).exists():
        source, target = (read_bytes(file, name=str(file)) if file.exists() else b"" for file in files)
        return source, target
    source, target = ((words and words.splitter.codes) or b"" for words in learn_vocabularies(config, corpus))
    return source, target


def write_vocabularies(config: TrainConfig, data: Prepared) -> None:
    """Write the SentencePiece models, for other programs and for resuming."""
    for name, vocabulary in (("source", data.source), ("target", data.target)):
        if vocabulary is not None and (codes := vocabulary.splitter.codes) and config.init is None:
            write_atomically(config.out / FOLDER / f"{name}.model", codes)


def prepare(
    config: TrainConfig, vocabularies: tuple[Vocabulary | None, Vocabulary] | None, processes: Processes
) -> Prepared:
    """The training data of a run; without `vocabularies` the main process reads or learns them for all processes."""
    corpus, valid = open_corpus(config.source, target=config.target, max_sentences=config.max_sentences), None
    if config.fraction < 1:
        corpus = corpus.share(config.fraction, seed=config.seed)
    if config.valid_source is not None:
        valid = open_corpus(config.valid_source, target=config.valid_target)
    if vocabularies is None:
        source_codes, target_codes = processes.on_main(lambda: vocabulary_codes(config, corpus))
        target = vocabulary_of(target_codes)
        shared = source_codes == target_codes
        vocabularies = (target if shared else vocabulary_of(source_codes) if source_codes else None), target
    source, target = vocabularies
    train, n_dropped = _pairs(config, corpus, vocabularies)
    validation_pairs, texts = None, None
    if valid is not None:
        validation_pairs, _ = _pairs(config, valid, vocabularies)
        if config.kind == "translation":
            texts = [*_lines(config, valid, "source")], [*_lines(config, valid, "target")]
    for part, text, pairs in (("training", corpus, train), ("validation", valid, validation_pairs)):
        if text is not None and not pairs:
            raise DataError(
                f"all {text.count} {part} sentences are longer than {flag('max_length', config.max_length)}"
            )
    digest = _digest(config, corpus, valid, vocabularies)
    return Prepared(train, validation_pairs, source, target, texts, n_dropped, digest)


def _lines(config: TrainConfig, corpus: Corpus, side: SideName) -> Iterator[str]:
    learnt = config.tokenizer is None and config.init is None
    language = config.source_lang if side == "source" else config.target_lang
    normalise = normaliser(config.normalise, language, learnt=learnt)
    return (normalise(getattr(sentence, side) or "") for sentence in corpus)


def _pairs(
    config: TrainConfig, corpus: Corpus, vocabularies: tuple[Vocabulary | None, Vocabulary]
) -> tuple[TrainingPairs, int]:
    """Ids of a corpus, and how many sentences were too long."""
    source, target = vocabularies
    numbers = np.array([sentence.number for sentence in corpus], dtype=np.int64)
    if source is None:
        targets_ids = encode_texts(target, [*_lines(config, corpus, "source")])
        if config.block is not None:
            return _blocks(targets_ids, target, config.block, numbers), 0
        sources_ids: list[list[int]] | None = None
    else:
        sources_ids = encode_texts(source, [*_lines(config, corpus, "source")])
        targets_ids = encode_texts(target, [*_lines(config, corpus, "target")])
    lengths = [max(len(ids), len(sources_ids[n]) if sources_ids else 0) for n, ids in enumerate(targets_ids)]
    keep = [n for n, length in enumerate(lengths) if length < config.max_length]
    source_texts = None if sources_ids is None else TokenizedTexts.of([sources_ids[n] for n in keep])
    target_texts = TokenizedTexts.of([targets_ids[n] for n in keep])
    pairs = TrainingPairs(source_texts, target_texts, numbers[keep], source, target)
    return pairs, len(targets_ids) - len(keep)


def _blocks(texts: Sequence[Sequence[int]], vocabulary: Vocabulary, block: int, numbers: Numbers) -> TrainingPairs:
    """The texts, each with an end, concatenated and cut into blocks of `block` ids; `numbers` are of sentences."""
    stream = [number for ids in texts for number in (*ids, vocabulary.end)]
    ends = np.cumsum([len(ids) + 1 for ids in texts])
    starts = np.arange(0, len(stream), block)
    texts_of_blocks = TokenizedTexts.of([stream[n : n + block] for n in starts])
    first_sentences = numbers[np.searchsorted(ends, starts, side="right")]
    return TrainingPairs(None, texts_of_blocks, first_sentences, None, vocabulary, has_ends=False)


def _digest(
    config: TrainConfig, corpus: Corpus, valid: Corpus | None, vocabularies: tuple[Vocabulary | None, Vocabulary]
) -> str:
    settings = [corpus.digest, None if valid is None else valid.digest, config.kind, config.block, config.max_length]
    settings += [config.normalise, config.source_lang, config.target_lang]
    digest = hashlib.sha256(json.dumps(settings).encode())
    for vocabulary in vocabularies:
        if vocabulary is not None:
            special = (vocabulary.start, vocabulary.end, vocabulary.prefix, vocabulary.suffix)
            digest.update(json.dumps([vocabulary.subwords, *special]).encode())
            digest.update(vocabulary.splitter.codes or b"")
    return digest.hexdigest()


UNKNOWN, START, END, PAD = range(4)
RULES = {"none": "nmt_nfkc", "lowercase": "nmt_nfkc_cf"}


def learn_vocabulary(texts: Iterable[str], *, size: int, kind: str, normalise: Normalise) -> Vocabulary:
    """A vocabulary of `size` subwords, `kind` "bpe" or "unigram", in which no character of the texts is unknown.

    For `normalise` "none" and "lowercase" the SentencePiece model itself applies Unicode's NFKC (and lower-cases); for
    "moses" it leaves text as it is. DataError where the text does not give that many subwords.
    """
    import sentencepiece

    model_file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model_file,
            model_type=kind,
            vocab_size=size,
            character_coverage=1.0,
            normalization_rule_name=RULES.get(normalise, "identity"),
            unk_id=UNKNOWN,
            bos_id=START,
            eos_id=END,
            pad_id=PAD,
            num_threads=1,
            max_sentence_length=1 << 20,
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).rpartition("] ")[2].split())[:160]
        raise DataError(f"{flag.vocab_size} {size} does not fit the text; {reason or 'give another'}") from None
    return vocabulary_of(model_file.getvalue())


def vocabulary_of(codes: bytes) -> Vocabulary:
    """The vocabulary of a SentencePiece model with its special ids; a model without a start has its end as start."""
    import sentencepiece

    splitter = Splitter("sentencepiece", codes)
    model = sentencepiece.SentencePieceProcessor(model_proto=codes)
    if model.eos_id() < 0:
        raise DataError("the SentencePiece model has no end-of-sentence subword (eos); train one that has it")
    subwords = tuple(model.id_to_piece(number) for number in range(model.get_piece_size()))
    start = model.bos_id() if model.bos_id() >= 0 else model.eos_id()
    pad = model.pad_id() if model.pad_id() >= 0 else None
    return Vocabulary(subwords, splitter, start=start, end=model.eos_id(), unknown=model.unk_id(), pad=pad)


def encode_texts(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, without special ones: a faster `Vocabulary.encode` of many texts."""
    codes = vocabulary.splitter.codes
    if vocabulary.splitter.kind == "sentencepiece" and codes is not None:
        import sentencepiece

        model: Any = sentencepiece.SentencePieceProcessor(model_proto=codes)
        pieces = tuple(model.id_to_piece(number) for number in range(model.get_piece_size()))
        if pieces == vocabulary.subwords and model.unk_id() == vocabulary.unknown:
            return list(model.encode(list(texts), num_threads=1))
    return [vocabulary.encode(text) for text in texts]


def normaliser(method: Normalise, language: str, *, learnt: bool = True) -> Callable[[str], str]:
    """The function that normalises a line before it is split; a `learnt` SentencePiece model lower-cases by itself.

    "moses": Moses's punctuation normalisation, then its tokenizer (without escapes for XML), by sacremoses;
    "moses-lowercase" lower-cases first, as Multi30k's task-1 text is made (lowercase, normalise, tokenise).
    """
    if not method.startswith("moses"):
        return str.lower if method == "lowercase" and not learnt else str
    lowercases = method == "moses-lowercase"
    split = _moses(language)
    return lambda text: split(text.lower() if lowercases else text)


@lru_cache(maxsize=4)
def _moses(language: str) -> Callable[[str], str]:
    message = f"{flag.normalise} moses needs sacremoses: pip install 'headscope[train]'"
    with restate(ConfigError, message, ModuleNotFoundError):
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
        from sacremoses.corpus import NonbreakingPrefixes
    languages = {*NonbreakingPrefixes().available_langs.values(), "ja", "ko"}
    if language not in languages:  # sacremoses would silently use the rules of English
        raise ConfigError(f"moses has no rules for the language {language!r}; choose {', '.join(sorted(languages))}")
    punctuation, tokenizer = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)

    def split(text: str) -> str:
        return tokenizer.tokenize(punctuation.normalize(text), return_str=True, escape=False)

    return split
