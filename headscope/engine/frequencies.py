"""Frequency ranks of the model's subwords: from a file of counts, or counted over a text."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headscope.data.corpus import Corpus
from headscope.errors import DataError, flag
from headscope.files.reading import read_lines
from headscope.formats.base import Checkpoint

CHUNK = 1024


def token_frequencies(
    checkpoint: Checkpoint, corpus: Corpus, *, file: Path | None = None, text: Path | None = None, limit: int
) -> dict[str, Any]:
    """`ranks` and `frequencies` for `RunOptions`, from a `file` of counts, another `text`, or the corpus itself."""
    if file:
        counts, source = read_counts(checkpoint, file), file.name
    else:
        lines = read_lines(text) if text else (sentence.source for sentence in corpus)
        counts, source = count_subwords(checkpoint, lines, limit=limit), text.name if text else "source"
    return {"ranks": frequency_ranks(checkpoint, counts), "frequencies": source}


def frequency_ranks(checkpoint: Checkpoint, counts: Mapping[int, int]) -> Tensor:
    """The frequency rank of every source id [V], 1 for the most frequent; of equal counts the subword decides.

    Special ids have rank 0, so that they are never rare, not even where they are kept.
    """
    plain = checkpoint.plain_ids(side="source")
    subwords = dict(zip(plain, checkpoint.subwords(plain, side="source"), strict=True))
    by_frequency = sorted(plain, key=lambda number: (-counts.get(number, 0), subwords[number] or ""))
    ranks = torch.zeros(checkpoint.vocabulary, dtype=torch.long)
    ranks[torch.tensor(by_frequency)] = torch.arange(1, len(by_frequency) + 1)
    return ranks


def count_subwords(checkpoint: Checkpoint, texts: Iterable[str], *, limit: int) -> Counter[int]:
    """Counts of each id in texts, special ids left out."""
    counts, remaining = Counter[int](), iter(texts)
    while chunk := list(islice(remaining, CHUNK)):
        for sentence in checkpoint.encode(chunk, side="source", limit=limit):
            counts.update(number for number, special in zip(sentence.ids, sentence.special, strict=True) if not special)
    return counts


def read_counts(checkpoint: Checkpoint, path: Path) -> Counter[int]:
    """Counts from lines `token count` (blank or tab between); tokens are the model's subwords.

    DataError for a line of another form, or where less than half of the tokens are subwords of the model.
    """
    counts, lines = Counter[int](), 0
    for lines, line in enumerate(read_lines(path), start=1):
        token, _, number = line.rstrip().replace("\t", " ").rpartition(" ")
        if not token.strip() or not re.fullmatch(r"\d{1,18}", number, re.ASCII):
            raise DataError(f"{path}:{lines}: {line[:60]!r} is not `token count`; write a token, a blank and a number")
        token_id = checkpoint.id_of(token.strip(), side="source")
        if token_id is not None:
            counts[token_id] += int(number)
    if len(counts) * 2 < lines:
        raise DataError(
            f"{path}: only {len(counts)} of {lines} tokens are subwords of this model; count its own subwords "
            f"(or give {flag.frequency_corpus}, which does that)"
        )
    return counts
