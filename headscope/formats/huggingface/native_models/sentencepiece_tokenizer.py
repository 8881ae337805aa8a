"""A SentencePiece model as a tokenizer of the `tokenizers` library: the same ids, without SentencePiece.

The model's own table of characters normalises (`Precompiled`), spaces become ▁, and its merges or scores split. Where
`tokenizers` goes by graphemes and SentencePiece by characters, texts are composed first (NFC); what stays different are
marks over characters with which no character of Unicode combines them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from headscope.assets import sample
from headscope.data.vocabulary import Vocabulary

BPE, UNIGRAM = 2, 1  # sentencepiece_model.proto, TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # ModelProto.SentencePiece.Type
DECOMPOSED, COMPOSED = "u\u0308", "\u00fc"
UNUSUAL = ("  two  spaces \t", "Stra\u00dfe 1\u00bd \u2122", "\u4e16\u754c \U0001f600", "aaaaaaa -----")
"""Texts, beside those of the sample, on which ids are compared before a tokenizer is kept."""


def tokenizer_of(vocabulary: Vocabulary) -> Any:
    """The `tokenizers.Tokenizer` of a vocabulary, without special tokens around a text.

    None where there is no SentencePiece model, where its pieces are not the subwords of the vocabulary, where it is of
    another kind than BPE and unigram or has pieces of the user's, and where ids of a sample of texts differ.
    """
    if vocabulary.splitter.kind != "sentencepiece" or vocabulary.splitter.codes is None:
        return None
    import sentencepiece.sentencepiece_model_pb2

    messages: Any = sentencepiece.sentencepiece_model_pb2
    model = messages.ModelProto.FromString(vocabulary.splitter.codes)
    if not _expressible(model, vocabulary):
        return None
    tokenizer = _assembled(model, vocabulary.splitter.codes)
    return tokenizer if _same_ids(tokenizer, vocabulary) else None


def _expressible(model: Any, vocabulary: Vocabulary) -> bool:
    """Whether `tokenizers` can say what a model does."""
    usual = {NORMAL, UNKNOWN, CONTROL, UNUSED}
    return (
        tuple(piece.piece for piece in model.pieces) == vocabulary.subwords
        and all(piece.type in usual for piece in model.pieces)
        and model.trainer_spec.model_type in (BPE, UNIGRAM)
        and not model.trainer_spec.treat_whitespace_as_suffix
        and model.normalizer_spec.escape_whitespaces
    )


def _assembled(model: Any, codes: bytes) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers

    unigram = model.trainer_spec.model_type == UNIGRAM
    tokenizer = Tokenizer(_unigram(model) if unigram else _bpe(model))
    tokenizer.normalizer = _normalizer(model, codes)
    steps: list[Any] = [
        pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="never", split=_splits_at_spaces(model))
    ]
    if unigram:  # a control piece that is written out is text, so its first character stands alone
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in _controls(model))
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return tokenizer


def _normalizer(model: Any, codes: bytes) -> Any:
    """What is done to a text before it is split: the model's characters, single spaces, ▁ for them and in front."""
    import sentencepiece
    from tokenizers import Regex, normalizers

    spec, steps = model.normalizer_spec, list[Any]()
    if spec.precompiled_charsmap:
        processor = sentencepiece.SentencePieceProcessor(model_proto=codes)
        steps += [normalizers.NFC()] if processor.normalize(DECOMPOSED).strip("▁ ") == COMPOSED else []
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    steps.append(normalizers.Replace(" ", "▁"))
    steps += [normalizers.Prepend("▁")] if spec.add_dummy_prefix else []
    return normalizers.Sequence(steps)


def _unigram(model: Any) -> Any:
    from tokenizers import models

    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    return models.Unigram(pieces, unk_id=model.trainer_spec.unk_id)


def _bpe(model: Any) -> Any:
    """Merges by score: SentencePiece joins the two neighbours whose piece has the highest, from the left."""
    from tokenizers import models

    ids = {piece.piece: number for number, piece in enumerate(model.pieces)}
    normal = {piece.piece for piece in model.pieces if piece.type == NORMAL}
    merges = [
        (-piece.score, ids[left], ids[right], left, right)
        for piece in model.pieces
        if piece.type == NORMAL
        for left, right in _halves(piece.piece)
        if left in normal and right in normal
    ]
    ordered = [(left, right) for *_, left, right in sorted(merges)]
    return models.BPE(ids, ordered, unk_token=model.trainer_spec.unk_piece, fuse_unk=True)


def _halves(piece: str) -> Sequence[tuple[str, str]]:
    return [(piece[:end], piece[end:]) for end in range(1, len(piece))]


def _splits_at_spaces(model: Any) -> bool:
    """Whether no piece goes on over a space, so that words can be split one by one."""
    return not any("▁" in piece.piece[1:] for piece in model.pieces if piece.type == NORMAL)


def _controls(model: Any) -> list[str]:
    """Pieces that no text is split into."""
    return [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL) and len(piece.piece) > 1]


def _same_ids(tokenizer: Any, vocabulary: Vocabulary) -> bool:
    """Whether ids of the sample corpus, and of a few unusual texts, are the vocabulary's own."""
    texts = [line for kind in ("en", "de") for line in sample(kind).read_text(encoding="utf-8").splitlines()]
    texts += UNUSUAL
    found = tokenizer.encode_batch(texts, add_special_tokens=False)
    return all(ids.ids == vocabulary.encode(text) for text, ids in zip(texts, found, strict=True))
