"""A native Transformer as a Hugging Face directory, and what transformers computes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headscope.data.vocabulary import Vocabulary
from headscope.formats.exports import Conversion, Probe
from headscope.formats.huggingface.generation import CLOSED
from headscope.formats.huggingface.native_models.from_native import make, quiet_transformers
from headscope.formats.huggingface.native_models.sentencepiece_tokenizer import tokenizer_of
from headscope.formats.huggingface.native_models.targets import table_ends
from headscope.formats.transformer_checkpoint import TransformerCheckpoint

OWN_CODE = ("FSMT", "XGLM")  # they bypass transformers' attention interface, and overflow in double precision


def converted(checkpoint: TransformerCheckpoint, folder: Path, probe: Probe) -> Conversion:
    """Write weights, configs and, where transformers has one, a tokenizer; read the model again with transformers."""
    import transformers

    name = make(checkpoint, folder)
    auto: Any = transformers.AutoModelForSeq2SeqLM if checkpoint.two_sided else transformers.AutoModelForCausalLM
    own_code = name.startswith(OWN_CODE)
    inputs = {"input_ids": probe.target}
    if checkpoint.two_sided:
        inputs = {
            "input_ids": probe.source,
            "attention_mask": probe.real.long(),
            "decoder_input_ids": probe.target,
        }
    with quiet_transformers(), torch.no_grad():
        model = auto.from_pretrained(folder, dtype=torch.float32 if own_code else torch.float64, local_files_only=True)
        logits = model.eval()(**inputs, use_cache=False).logits
    notes = [_write_vocabulary(checkpoint, folder)]
    if any(module.mixing is not None for _, _, _, module in checkpoint.model.attention_modules()):
        notes.append("the matrices that mix heads are folded into the output projections")
    if (end := table_ends(name, checkpoint.model.config)) is not None:
        notes.append(f"{name} keeps positions in a table, which ends at {end} tokens")
    if own_code:
        notes.append(
            f"transformers computes {name}'s attention in code of its own; analyse the original, not this copy"
        )
    opens = (f"transformers, without any code of its own: class {name}", "headscope")
    return Conversion(name, logits, tuple(notes), opens, _limits(checkpoint))


def _limits(checkpoint: TransformerCheckpoint) -> tuple[str, ...]:
    """What a folder cannot be used for."""
    if checkpoint.target is None:
        return ("texts: there is no vocabulary, so give ids",)
    return ("fairseq and headscope's own trainer: they go on from the original",)


def _write_vocabulary(checkpoint: TransformerCheckpoint, folder: Path) -> str:
    """Write a tokenizer where transformers has one for the vocabularies; gives the note that the user reads."""
    source, target = checkpoint.source, checkpoint.target
    if target is None:
        return "no tokenizer: the checkpoint came without vocabularies"
    if source is None or (source.subwords, source.special_ids) == (target.subwords, target.special_ids):
        if (inner := tokenizer_of(target)) is not None:
            _write_tokenizer(inner, checkpoint, folder, split_special_tokens=True)
            return "the tokenizer gives the ids of the SentencePiece model, without SentencePiece"
        if target.unknown is not None and target.splitter.kind in ("words", "bpe"):
            _write_tokenizer(_words(target), checkpoint, folder)
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


def _words(vocabulary: Vocabulary) -> Any:
    """A tokenizer of text that is split already."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assert vocabulary.unknown is not None
    ids = {subword: number for number, subword in enumerate(vocabulary.subwords)}
    inner = Tokenizer(models.WordLevel(ids, vocabulary.subwords[vocabulary.unknown]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def _write_tokenizer(inner: Any, checkpoint: TransformerCheckpoint, folder: Path, **more: Any) -> None:
    """Write a tokenizer that ends what an encoder reads, and begins what a decoder alone reads.

    A language model was trained on texts that end: `texts_end_with_eos` says so to `headscope evaluate`, which counts
    the end as a token of the text; transformers' tokenizers of language models leave it out, so that texts go on.
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
