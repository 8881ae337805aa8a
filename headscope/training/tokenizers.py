"""How text becomes subwords: what is normalised first, and SentencePiece tokenizers, learnt or read from a file."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from headscope.data.vocabulary import Splitter, Vocabulary
from headscope.errors import ConfigError, DataError, flag
from headscope.files.reading import read_bytes
from headscope.training.config import Normalise

UNKNOWN, START, END, PAD = range(4)
RULES = {"none": "nmt_nfkc", "lowercase": "nmt_nfkc_cf"}


def learn(texts: Iterable[str], *, size: int, kind: str, normalise: Normalise) -> Vocabulary:
    """A vocabulary of `size` subwords, `kind` "bpe" or "unigram", in which no character of the texts is unknown.

    Raw text is brought to Unicode's NFKC by the model itself ("lowercase": and to lower case); text that
    is normalised already is left as it is. DataError where the text does not give that many subwords.
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
        raise DataError(f"{flag.vocab_size} {size} does not fit the text; {reason or 'take another'}") from None
    return vocabulary(model_file.getvalue())


def read(path: Path) -> Vocabulary:
    """The vocabulary of a SentencePiece model; DataError for a file that is none."""
    codes = read_bytes(path, name=f"{flag.tokenizer} {path}")
    try:
        return vocabulary(codes)
    except DataError as error:
        raise DataError(f"{flag.tokenizer} {path}: {error}") from None


def vocabulary(codes: bytes) -> Vocabulary:
    """The subwords of a SentencePiece model with its own special ids; the start is its end where it has no start."""
    import sentencepiece

    splitter = Splitter("sentencepiece", codes)
    model = sentencepiece.SentencePieceProcessor(model_proto=codes)
    if model.eos_id() < 0:
        raise DataError("the SentencePiece model has no subword that ends a text (eos); learn one that has")
    subwords = tuple(model.id_to_piece(number) for number in range(model.get_piece_size()))
    start = model.bos_id() if model.bos_id() >= 0 else model.eos_id()
    pad = model.pad_id() if model.pad_id() >= 0 else None
    return Vocabulary(subwords, splitter, start=start, end=model.eos_id(), unknown=model.unk_id(), pad=pad)


def encode(vocabulary: Vocabulary, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts, without special ones: what `its.encode` gives, many at a time."""
    codes = vocabulary.splitter.codes
    if vocabulary.splitter.kind == "sentencepiece" and codes is not None:
        import sentencepiece

        model: Any = sentencepiece.SentencePieceProcessor(model_proto=codes)
        pieces = tuple(model.id_to_piece(number) for number in range(model.get_piece_size()))
        if pieces == vocabulary.subwords and model.unk_id() == vocabulary.unknown:
            return list(model.encode(list(texts), num_threads=1))
    return [vocabulary.encode(text) for text in texts]


def normaliser(method: Normalise, language: str, *, learnt: bool = True) -> Callable[[str], str]:
    """What is done to every line before it is split into subwords; a tokenizer that was `learnt` lower-cases itself.

    "moses": Moses's punctuation normalisation, then its tokenizer (without escapes for XML), by sacremoses;
    "moses-lowercase" lower-cases first, as Multi30k's task-1 text is made (lowercase, normalise, tokenise).
    """
    if not method.startswith("moses"):
        return str.lower if method == "lowercase" and not learnt else str
    low = method == "moses-lowercase"
    split = _moses(language)
    return lambda text: split(text.lower() if low else text)


@lru_cache(maxsize=4)
def _moses(language: str) -> Callable[[str], str]:
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
        from sacremoses.corpus import NonbreakingPrefixes
    except ModuleNotFoundError:
        raise ConfigError(f"{flag.normalise} moses needs sacremoses: pip install 'headscope[train]'") from None
    languages = {*NonbreakingPrefixes().available_langs.values(), "ja", "ko"}
    if language not in languages:  # sacremoses would take the rules of English
        raise ConfigError(f"moses has no rules for the language {language!r}; choose {', '.join(sorted(languages))}")
    marks, tokens = MosesPunctNormalizer(lang=language), MosesTokenizer(lang=language)

    def split(text: str) -> str:
        return tokens.tokenize(marks.normalize(text), return_str=True, escape=False)

    return split
