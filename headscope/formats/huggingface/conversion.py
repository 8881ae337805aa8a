"""A native Transformer as a Hugging Face directory, and what transformers computes with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from headscope.data.vocabulary import Vocabulary
from headscope.formats.huggingface.from_native import make, quiet_transformers
from headscope.formats.probe import Conversion, Probe
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
    if own_code:
        notes.append(
            f"transformers computes {name}'s attention in code of its own; analyse the original, not this copy"
        )
    return Conversion(name, logits, tuple(notes))


def _write_vocabulary(checkpoint: TransformerCheckpoint, folder: Path) -> str:
    """Write a tokenizer where transformers has one for the vocabularies; gives the note that the user reads."""
    source, target = checkpoint.source, checkpoint.target
    if target is None:
        return "no tokenizer: the checkpoint came without vocabularies"
    shared = source is None or (source.subwords, source.special_ids) == (target.subwords, target.special_ids)
    if shared and target.unknown is not None and target.splitter.kind in ("words", "bpe"):
        _write_tokenizer(target, folder, two_sided=checkpoint.two_sided)
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


def _write_tokenizer(vocabulary: Vocabulary, folder: Path, *, two_sided: bool) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = {
        "unk": vocabulary.unknown,
        "pad": vocabulary.pad,
        "eos": vocabulary.end,
        "bos": min(vocabulary.special, default=None),
    }
    tokens = {f"{name}_token": vocabulary.subwords[number] for name, number in names.items() if number is not None}
    inner = Tokenizer(
        models.WordLevel({subword: n for n, subword in enumerate(vocabulary.subwords)}, tokens["unk_token"])
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    mark = vocabulary.subwords[vocabulary.end if two_sided else vocabulary.start]
    inner.post_processor = processors.TemplateProcessing(
        single=f"$A {mark}" if two_sided else f"{mark} $A",
        special_tokens=[(mark, vocabulary.end if two_sided else vocabulary.start)],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **tokens)
    tokenizer.save_pretrained(folder)
