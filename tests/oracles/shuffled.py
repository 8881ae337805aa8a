"""Batches in another order than the package's: the padding is anywhere, not in the first rows."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from headscope.bootstrap import FOLDS
from headscope.data.batching import batches
from headscope.data.corpus import Corpus, Sentence
from headscope.data.encoded import IGNORED, Batch, Side


def in_folds(corpus: Corpus, folds: int) -> Corpus:
    """The sentences, renumbered into so many folds: batches are within a fold, and few full ones are quick."""

    def read() -> Iterator[Sentence]:
        for number, line in enumerate(corpus):
            yield line._replace(number=FOLDS * (number // folds) + number % folds)

    return replace(corpus, read=read)


def reverse_folds(corpus: Corpus, encoder: Any, **options: Any) -> Iterator[Batch]:
    """Whole folds, last one first, sentences in corpus order."""
    options["tokens"] = 1
    single = sorted(batches(corpus, encoder, **options), key=lambda batch: int(batch.indices))
    assert len(single) == corpus.count
    for fold in reversed(range(FOLDS)):
        members = [batch for batch in single if batch.fold == fold]
        if members:
            yield join_batches(members, fold)


def join_batches(members: list[Batch], fold: int) -> Batch:
    """Batches of one sentence as one batch, in this order."""
    targets = [batch.target for batch in members if batch.target is not None]
    labels = [batch.labels for batch in members if batch.labels is not None]
    return Batch(
        indices=torch.cat([batch.indices for batch in members]),
        fold=fold,
        source=_padded([batch.source for batch in members]),
        target=_padded(targets) if targets else None,
        labels=_stack(labels, IGNORED) if labels else None,
        sentences=tuple(sentence for batch in members for sentence in batch.sentences),
    )


def _padded(sides: list[Side]) -> Side:
    values = {field.name: [getattr(side, field.name) for side in sides] for field in fields(Side)}
    aligned = tuple(sentence for sentences in values.pop("aligned") for sentence in sentences)
    tensors: dict[str, Any] = {name: None if rows[0] is None else _stack(rows, 0) for name, rows in values.items()}
    return Side(**tensors, aligned=aligned)


def _stack(rows: list[Tensor], filler: int) -> Tensor:
    width = max(row.shape[1] for row in rows)
    return torch.cat([nn.functional.pad(row, (0, width - row.shape[1]), value=filler) for row in rows])
