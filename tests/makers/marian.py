"""Small random Marians in folders, with tokenizers of their own kind."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

from headscope.assets import captions
from headscope.training.prepare import learn_vocabulary


def marian(folder: Path, sizes: Sequence[int], **options: Any) -> Any:
    """The model, not saved, beside its tokenizer; with two sizes, each side has a vocabulary of its own."""
    folder.mkdir(parents=True)
    lines = [captions(language).read_text(encoding="utf-8").splitlines() for language in ("en", "de")]
    learnt = [
        learn_vocabulary(text, size=size, kind="unigram", normalise="none")
        for text, size in zip(lines, sizes, strict=False)
    ]
    for side, vocabulary in (("source", learnt[0]), ("target", learnt[-1])):
        (folder / f"{side}.spm").write_bytes(vocabulary.splitter.codes or b"")
    names = ["vocab.json", "target_vocab.json"][: len(sizes)]
    subwords = [["</s>", "<unk>", *vocabulary.subwords[4:], "<pad>"] for vocabulary in learnt]
    for name, pieces in zip(names, subwords, strict=True):
        (folder / name).write_text(json.dumps({subword: number for number, subword in enumerate(pieces)}))
    make: Any = transformers.MarianTokenizer
    files = [str(folder / name) for name in ("source.spm", "target.spm", *names)]
    separate = len(sizes) == 2
    make(*files, source_lang="en", target_lang="de", separate_vocabs=separate).save_pretrained(folder)
    pad = len(subwords[0]) - 1
    ids: dict[str, Any] = {"pad_token_id": pad, "decoder_start_token_id": pad, "eos_token_id": 0}
    counts: dict[str, Any] = {"vocab_size": pad + 1, "decoder_vocab_size": len(subwords[-1])}
    torch.manual_seed(0)
    return transformers.MarianMTModel(transformers.MarianConfig(**ids, **counts, **options))
