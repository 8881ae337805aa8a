"""Batches as `fairseq-generate` makes them, for files whose rows are batches and whose numbers count padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headscope.data.corpus import Corpus
from headscope.data.encoded import Batch, Encoded, Side, pad_side
from headscope.data.vocabulary import Vocabulary
from headscope.errors import ConfigError
from headscope.formats.transformer_checkpoint import TransformerCheckpoint

SEED = 1  # fairseq-generate's; it decides about the order of equally long sentences
MULTIPLE = 8  # --required-batch-size-multiple
SENTENCES = 32


@dataclass(frozen=True)
class BatchSize:
    """fairseq's --batch-size and --max-tokens: sentences, and sentences × the longest side of any; None: no limit.

    Neither: 32 sentences.
    """

    sentences: int | None = None
    tokens: int | None = None

    @property
    def most_sentences(self) -> int | None:
        """The limit on sentences, with its default."""
        return SENTENCES if self.sentences is None and self.tokens is None else self.sentences


def fork_batches(
    checkpoint: TransformerCheckpoint, corpus: Corpus, *, limit: int, size: BatchSize | None = None
) -> Iterator[Batch]:
    """All sentences, the shortest sources first, each batch by falling length of its sources.

    Sources are padded on the left, targets on the right, with the ids of padding, which the model embeds as
    fairseq does (`headscope.model.native.layers`). ConfigError where a sentence alone has more than `size.tokens`.
    """
    texts, pads = list(corpus), {name: _pad(checkpoint, name) for name in ("source", "target")}
    sources = checkpoint.encode([text.source for text in texts], side="source", limit=limit)
    targets: list[Encoded | None] = [None] * len(texts)
    if corpus.has_target:
        targets = [*checkpoint.encode([text.target or "" for text in texts], side="target", limit=limit)]
    lengths = [
        (len(source.ids), 0 if target is None else len(target.ids))
        for source, target in zip(sources, targets, strict=True)
    ]
    shuffled = np.random.RandomState(SEED).permutation(len(texts)).tolist()
    for group in groups(sorted(shuffled, key=lengths.__getitem__), lengths, size or BatchSize()):
        longest_first = torch.tensor([lengths[n][0] for n in group]).sort(descending=True).indices
        numbers = [
            group[position] for position in longest_first.tolist()
        ]  # torch decides about ties, as when fairseq sorts
        read = pad_side([sources[n] for n in numbers], pad=pads["source"])
        encoded = [target for n in numbers if (target := targets[n]) is not None]
        target = pad_side(encoded, pad=pads["target"]) if encoded else None
        width = read.ids.shape[1]
        order = (torch.arange(width) + read.real.sum(dim=1, keepdim=True)) % width
        padded_left = Side(*(tensor.gather(1, order) for tensor in (read.ids, read.real, read.special)))
        yield Batch(torch.tensor(numbers), 0, padded_left, target)


def groups(order: Sequence[int], lengths: Sequence[tuple[int, int]], size: BatchSize) -> list[list[int]]:
    """Cut `order` into batches as fairseq's batch_by_size does: a full batch is closed at a multiple of 8."""
    closed_batches, batch, longest = list[list[int]](), list[int](), 0
    for number in order:
        longest = max(longest, *lengths[number])
        if size.tokens is not None and longest > size.tokens:
            raise ConfigError(
                f"--mhr-max-tokens {size.tokens}: sentence {number + 1} has {longest} subwords; raise it, or give "
                f"--max-length {size.tokens}"
            )
        crowded = size.tokens is not None and longest * (len(batch) + 1) > size.tokens
        if batch and (crowded or len(batch) == size.most_sentences):
            closed = max(MULTIPLE * (len(batch) // MULTIPLE), len(batch) % MULTIPLE)
            closed_batches.append(batch[:closed])
            batch = batch[closed:]
            longest = max(max(lengths[n]) for n in (*batch, number))
        batch.append(number)
    return [*closed_batches, batch] if batch else closed_batches


def _pad(checkpoint: TransformerCheckpoint, name: str) -> int:
    vocabulary: Vocabulary | None = getattr(checkpoint, name if checkpoint.two_sided else "target")
    assert vocabulary is not None, "it has encoded the text"
    return vocabulary.padding
