"""Tokenizers of the `tokenizers` library for native vocabularies: of split text, and of SentencePiece models.

A SentencePiece model becomes one with the same ids: `Precompiled` characters, ▁ for spaces, merges or scores. Texts are
composed first (NFC), as `tokenizers` goes by graphemes; marks that no character of Unicode combines stay different.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from headscope.assets import sample
from headscope.data.vocabulary import Vocabulary
from headscope.formats.huggingface.companions.folder import CLOSED
from headscope.formats.transformer_checkpoint import TransformerCheckpoint

BPE, UNIGRAM = 2, 1  # sentencepiece_model.proto, TrainerSpec.ModelType
NORMAL, UNKNOWN, CONTROL, UNUSED = 1, 2, 3, 5  # ModelProto.SentencePiece.Type
DECOMPOSED, COMPOSED = "u\u0308", "\u00fc"
UNUSUAL = ("  two  spaces \t", "Stra\u00dfe 1\u00bd \u2122", "\u4e16\u754c \U0001f600", "aaaaaaa -----")
"""Texts, beside those of the sample, on which ids are compared before a tokenizer is kept."""


def write_vocabulary(checkpoint: TransformerCheckpoint, folder: Path) -> str:
    """Write a tokenizer where transformers has one for the vocabularies; gives the note that the user reads."""
    source, target = checkpoint.source, checkpoint.target
    if target is None:
        return "no tokenizer: the checkpoint came without vocabularies"
    if source is None or (source.subwords, source.special_ids) == (target.subwords, target.special_ids):
        if (inner := tokenizer_of(target)) is not None:
            _write_tokenizer(inner, checkpoint, folder, split_special_tokens=True)
            return "the tokenizer gives the ids of the SentencePiece model, without SentencePiece"
        if target.unknown is not None and target.splitter.kind in ("words", "bpe"):
            from tokenizers import Tokenizer, models, pre_tokenizers

            ids = {subword: number for number, subword in enumerate(target.subwords)}
            words = Tokenizer(models.WordLevel(ids, target.subwords[target.unknown]))
            words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
            _write_tokenizer(words, checkpoint, folder)
            return "the tokenizer takes text that is already split into subwords; split and join it with your BPE codes"
    for name, vocabulary in (("source", source), ("target", target)):
        if vocabulary is not None:
            (folder / f"{name}.pieces.json").write_text(
                json.dumps(vocabulary.subwords, ensure_ascii=False), encoding="utf-8"
            )
    return (
        "no tokenizer: transformers has none for these vocabularies; *.pieces.json list the subwords in the order of "
        "their ids, and a source text ends with the id of the end"
    )


def _write_tokenizer(inner: Any, checkpoint: TransformerCheckpoint, folder: Path, **more: Any) -> None:
    """Write a tokenizer that ends what an encoder reads, and begins what a decoder alone reads.

    Language models learnt from texts that end: `texts_end_with_eos` tells `headscope evaluate` to count the end.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    vocabulary, two_sided = checkpoint.target, checkpoint.two_sided
    assert vocabulary is not None
    names = {
        "unk": vocabulary.unknown,
        "pad": vocabulary.pad,
        "eos": vocabulary.end,
        "bos": min(vocabulary.special, default=vocabulary.start),
    }
    tokens = {f"{name}_token": vocabulary.subwords[number] for name, number in names.items() if number is not None}
    mark = vocabulary.subwords[vocabulary.end if two_sided else vocabulary.start]
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {mark}" if two_sided else f"{mark} $A",
        special_tokens=[(mark, vocabulary.end if two_sided else vocabulary.start)],
    )
    more |= {} if two_sided else {CLOSED: True, "padding_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **tokens, **more)
    tokenizer.save_pretrained(folder)


def tokenizer_of(vocabulary: Vocabulary) -> Any:
    """The tokenizer of a SentencePiece vocabulary; None for others, and where ids of sample texts differ."""
    if vocabulary.splitter.kind != "sentencepiece" or vocabulary.splitter.codes is None:
        return None
    import sentencepiece.sentencepiece_model_pb2

    messages: Any = sentencepiece.sentencepiece_model_pb2
    model = messages.ModelProto.FromString(vocabulary.splitter.codes)
    usual = {NORMAL, UNKNOWN, CONTROL, UNUSED}
    expressible = (
        tuple(piece.piece for piece in model.pieces) == vocabulary.subwords
        and all(piece.type in usual for piece in model.pieces)
        and model.trainer_spec.model_type in (BPE, UNIGRAM)
        and not model.trainer_spec.treat_whitespace_as_suffix
        and model.normalizer_spec.escape_whitespaces
    )
    if not expressible:
        return None
    if (tokenizer := _assemble(model, vocabulary.splitter.codes)) is None:
        return None
    texts = [line for kind in ("en", "de") for line in sample(kind).read_text(encoding="utf-8").splitlines()]
    texts += UNUSUAL
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    same_ids = all(ids.ids == vocabulary.encode(text) for text, ids in zip(texts, encodings, strict=True))
    return tokenizer if same_ids else None


def _assemble(model: Any, codes: bytes) -> Any:
    import sentencepiece
    from tokenizers import Regex, normalizers, pre_tokenizers
    from transformers.convert_slow_tokenizer import SpmConverter

    unigram = model.trainer_spec.model_type == UNIGRAM
    pieces = [(piece.piece, piece.score) for piece in model.pieces]
    vocabulary = pieces if unigram else {piece: number for number, (piece, _) in enumerate(pieces)}
    if (build := getattr(SpmConverter, "build_tokenizer_from_spm_proto", None)) is None:  # an earlier transformers
        return None
    tokenizer: Any = build(model, vocabulary)
    spec, processor = model.normalizer_spec, sentencepiece.SentencePieceProcessor(model_proto=codes)
    composes = spec.precompiled_charsmap and processor.normalize(DECOMPOSED).strip("▁ ") == COMPOSED
    before = [normalizers.NFC()] if composes else []
    behind = [normalizers.Replace(Regex(r"▁+\z"), "")] if spec.remove_extra_whitespaces else []
    tokenizer.normalizer = normalizers.Sequence([*before, tokenizer.normalizer, *behind])
    if unigram:  # a control piece that is written out is text, so its first character stands alone
        controls = [piece.piece for piece in model.pieces if piece.type in (UNKNOWN, CONTROL) and len(piece.piece) > 1]
        pattern = "|".join(f"{re.escape(name[0])}(?={re.escape(name[1:])})" for name in controls)
        split = pre_tokenizers.Split(Regex(pattern), behavior="merged_with_previous")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([tokenizer.pre_tokenizer, split])
    return tokenizer
