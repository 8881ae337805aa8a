"""From text files to ids and vocabularies: checked, normalised, tokenised, kept with the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from headscope.data.corpus import Corpus, open_corpus
from headscope.data.encoded import SideName, UnknownSubwords
from headscope.data.vocabulary import Vocabulary
from headscope.errors import DataError
from headscope.files.reading import read_bytes
from headscope.files.writing import write_atomically
from headscope.training.config import TrainConfig
from headscope.training.data import tokenizers
from headscope.training.data.batches import Numbers, TokenizedTexts, TrainingPairs
from headscope.training.data.tokenizers import normaliser

FOLDER, RECIPE = "data", "vocabulary.json"


@dataclass(frozen=True)
class Prepared:
    """What a run learns from: ids of both sides, their vocabularies, and the validation text for BLEU.

    `dropped` training sentences were longer than `--max-length`; `digest` is of texts, vocabularies and settings.
    """

    train: TrainingPairs
    valid: TrainingPairs | None
    source: Vocabulary | None
    target: Vocabulary
    valid_texts: tuple[list[str], list[str]] | None
    dropped: int
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

    def why_unknown(self, side: SideName) -> str:
        """What unknown subwords of a side probably come from, and what to do."""
        vocabulary = self.source if side == "source" and self.source is not None else self.target
        if vocabulary.splitter.codes is not None:
            return "is it tokenised and cased as the text that the vocabulary was learnt from?"
        return "it was taken as already split into subwords: give --bpe CODES, or split it with the codes of --init"


def learn_vocabularies(config: TrainConfig, corpus: Corpus) -> tuple[Vocabulary | None, Vocabulary]:
    """Of the source (None for language models) and the target: given, or learnt from the training text."""
    if config.tokenizer is not None:
        vocabulary = tokenizers.read(config.tokenizer)
        return (None if config.kind == "lm" else vocabulary), vocabulary
    learn = partial(tokenizers.learn, size=config.vocab_size, kind=config.tokenizer_kind, normalise=config.normalise)
    sources, targets = _lines(config, corpus)
    if config.kind == "lm":
        return None, learn(sources())
    if config.vocabulary == "separate":
        return learn(sources()), learn(targets())
    vocabulary = learn(chain(sources(), targets()))
    return vocabulary, vocabulary


def prepare(config: TrainConfig, vocabularies: tuple[Vocabulary | None, Vocabulary] | None = None) -> Prepared:
    """Everything that a run learns from.

    `vocabularies` None: those of the run in DIR, else given ones or learnt ones.
    """
    corpus, valid = open_corpus(config.source, target=config.target, max_sentences=config.max_sentences), None
    if config.fraction < 1:
        corpus = corpus.share(config.fraction, seed=config.seed)
    if config.valid_source is not None:
        valid = open_corpus(config.valid_source, target=config.valid_target)
    folder = config.out / FOLDER
    if vocabularies is None:
        settings = [corpus.digest, config.kind, config.vocabulary, config.vocab_size, config.tokenizer_kind]
        given = (
            b"" if config.tokenizer is None else read_bytes(config.tokenizer, name=f"--tokenizer {config.tokenizer}")
        )
        settings += [config.normalise, config.source_lang, config.target_lang, hashlib.sha256(given).hexdigest()]
        recipe = json.dumps(settings) + "\n"
        vocabularies = read_vocabularies(config, folder, recipe) or learn_vocabularies(config, corpus)
        write_vocabularies(folder, vocabularies, recipe)
    source, target = vocabularies
    train, dropped = _pairs(config, corpus, vocabularies)
    checked, texts = None, None
    if valid is not None:
        checked, _ = _pairs(config, valid, vocabularies)
        if config.kind == "translation":
            sources, targets = _lines(config, valid)
            texts = (list(sources()), list(targets()))
    for part, text, pairs in (("training", corpus, train), ("validation", valid, checked)):
        if text is not None and not pairs:
            raise DataError(
                f"all {text.count} {part} sentences are longer than --max-length {config.max_length} subwords, the "
                "closing one included"
            )
    digest = _digest(config, corpus, valid, vocabularies)
    return Prepared(train, checked, source, target, texts, dropped, digest)


def _lines(config: TrainConfig, corpus: Corpus) -> tuple[Callable[[], Iterator[str]], Callable[[], Iterator[str]]]:
    """The normalised lines of both sides, again and again."""
    learnt = config.tokenizer is None and config.init is None
    of_source, of_target = (
        normaliser(config.normalise, language, learnt=learnt) for language in (config.source_lang, config.target_lang)
    )
    sources = lambda: (of_source(pair.source) for pair in corpus)  # noqa: E731
    return sources, lambda: (of_target(pair.target or "") for pair in corpus)


def _pairs(
    config: TrainConfig, corpus: Corpus, vocabularies: tuple[Vocabulary | None, Vocabulary]
) -> tuple[TrainingPairs, int]:
    """Ids of a corpus, and how many sentences were too long."""
    source, target = vocabularies
    sources, targets = _lines(config, corpus)
    lines = np.array([sentence.number + 1 for sentence in corpus], dtype=np.int64)
    if source is None:
        targets_ids = tokenizers.encode(target, list(sources()))
        if config.block is not None:
            return _blocks(targets_ids, target, config.block, lines), 0
        sources_ids: list[list[int]] | None = None
    else:
        sources_ids = tokenizers.encode(source, list(sources()))
        targets_ids = tokenizers.encode(target, list(targets()))
    longest = [max(len(ids), len(sources_ids[n]) if sources_ids else 0) for n, ids in enumerate(targets_ids)]
    keep = [n for n, length in enumerate(longest) if length < config.max_length]
    source_texts = None if sources_ids is None else TokenizedTexts.of([sources_ids[n] for n in keep])
    target_texts = TokenizedTexts.of([targets_ids[n] for n in keep])
    pairs = pairs_of(source_texts, target_texts, lines[keep], source, target)
    return pairs, len(targets_ids) - len(keep)


def pairs_of(
    source: TokenizedTexts | None,
    target: TokenizedTexts,
    lines: Numbers,
    source_vocabulary: Vocabulary | None,
    target_vocabulary: Vocabulary,
    closed: bool = True,
) -> TrainingPairs:
    """Pairs with the special ids of their vocabularies."""
    around: tuple[tuple[int, ...], tuple[int, ...]] = (), ()
    padding = target_vocabulary.padding
    if (read := source_vocabulary) is not None:
        around = read.prefix, (read.end,) if read.suffix is None else read.suffix
        padding = read.padding
    pads = padding, target_vocabulary.padding
    return TrainingPairs(source, target, lines, target_vocabulary.start, target_vocabulary.end, *around, closed, pads)


def _blocks(texts: Sequence[Sequence[int]], vocabulary: Vocabulary, block: int, numbers: Numbers) -> TrainingPairs:
    """All texts, lines of these numbers, each closed, one after another, in blocks of as many ids."""
    stream = [number for ids in texts for number in (*ids, vocabulary.end)]
    ends = np.cumsum([len(ids) + 1 for ids in texts])
    starts = np.arange(0, len(stream), block)
    lines = numbers[np.searchsorted(ends, starts, side="right")]
    return pairs_of(
        None, TokenizedTexts.of([stream[n : n + block] for n in starts]), lines, None, vocabulary, closed=False
    )


def write_vocabularies(folder: Path, vocabularies: tuple[Vocabulary | None, Vocabulary], recipe: str) -> None:
    """The SentencePiece models, for other programs and for resuming, and last what they were made from.

    While they are written nothing says what they were made from, so none is taken for another's after a kill.
    """
    if (folder / RECIPE).exists() and (folder / RECIPE).read_bytes() == recipe.encode():
        return
    (folder / RECIPE).unlink(missing_ok=True)
    for name, vocabulary in zip(("source", "target"), vocabularies, strict=True):
        if codes := b"" if vocabulary is None else vocabulary.splitter.codes or b"":
            write_atomically(folder / f"{name}.model", lambda file, codes=codes: file.write_bytes(codes))  # type: ignore[misc]
    write_atomically(folder / RECIPE, lambda file: file.write_text(recipe, encoding="utf-8"))


def read_vocabularies(config: TrainConfig, folder: Path, recipe: str) -> tuple[Vocabulary | None, Vocabulary] | None:
    """What an interrupted run has learnt from the same text in the same way. Returns None if there is nothing."""
    try:
        if (folder / RECIPE).read_bytes() != recipe.encode():
            return None
        target = tokenizers.read(folder / "target.model")
        return (None if config.kind == "lm" else tokenizers.read(folder / "source.model")), target
    except (OSError, DataError):
        return None


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
