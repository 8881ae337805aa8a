"""Text as a model reads it: ids of sentences, sides of a batch, padded, and what an encoder of text must do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from headscope.data.syntax import Aligned

IGNORED = -100  # a label where nothing is to be predicted


class Encoded(NamedTuple):
    """A sentence as the model reads it: ids, which of them are special, how many pieces were cut off.

    `unknown` counts the ids that stand for a piece of the text that the vocabulary does not have.
    """

    ids: list[int]
    special: list[bool]
    cut: int = 0
    unknown: int = 0


@dataclass(frozen=True)
class Side:
    """Token ids [b n] of one side of a batch, which positions are real tokens (not padding), which special."""

    ids: Tensor
    real: Tensor
    special: Tensor

    def to(self, device: torch.device) -> Side:
        """The same on another device."""
        return Side(self.ids.to(device), self.real.to(device), self.special.to(device))

    def rows(self, numbers: Tensor) -> Side:
        """The texts at `numbers` [n], in that order, without the padding at the end that none of them needs."""
        needed = self.real[numbers].any(dim=0).nonzero()  # [n 1]
        length = int(needed[-1]) + 1 if len(needed) else 0
        return Side(*(its[numbers, :length] for its in (self.ids, self.real, self.special)))


@dataclass(frozen=True)
class Batch:
    """Sentences that go through the model together; `indices` [b] are their numbers in the corpus.

    `target` holds the decoder's inputs (the reference shifted right). `aligned` has word units and
    relations of the source where there are parses, None for sentences that do not align. `labels` [b n] is
    what a decoder should say after each of its inputs, `IGNORED` where nothing, if that was asked for.
    """

    indices: Tensor
    fold: int
    source: Side
    target: Side | None = None
    aligned: tuple[Aligned | None, ...] = ()
    kind: Literal["text", "random"] = "text"
    labels: Tensor | None = None

    @property
    def positions(self) -> int:
        """Positions of the larger side, padding included."""
        return max(side.ids.numel() for side in (self.source, self.target) if side is not None)

    def rows(self, numbers: Tensor) -> Batch:
        """The sentences at `numbers` [n], in that order, without the padding that none of them needs."""
        source = self.source.rows(numbers)
        target = None if self.target is None else self.target.rows(numbers)
        length = (source if target is None else target).ids.shape[1]
        return replace(
            self,
            indices=self.indices[numbers.cpu()],
            source=source,
            target=target,
            aligned=tuple(self.aligned[number] for number in numbers.tolist()) if self.aligned else (),
            labels=None if self.labels is None else self.labels[numbers, :length],
        )

    def to(self, device: torch.device) -> Batch:
        """The same with its sides on another device (`indices` stay where they are)."""
        target = None if self.target is None else self.target.to(device)
        labels = None if self.labels is None else self.labels.to(device)
        return replace(self, source=self.source.to(device), target=target, labels=labels)


class Encoder(Protocol):
    """What batching needs of a checkpoint."""

    def encode(self, texts: Sequence[str], *, side: Literal["source", "target"], limit: int) -> list[Encoded]:
        """Token ids of texts, at most `limit` of each."""
        ...

    def spans(self, text: str, ids: Sequence[int]) -> list[tuple[int, int] | None] | None:
        """Character span of every piece; None for special ones, None overall where they cannot be located."""
        ...

    def labels(self, texts: Sequence[str], *, limit: int) -> list[list[int]]:
        """What a decoder must say after each of its inputs."""
        ...


def padded(rows: Sequence[Sequence[int]], filler: int) -> Tensor:
    """Rows of whole numbers as one tensor [b n], filled up on the right."""
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (longest - len(row))] for row in rows], dtype=torch.long)


def side(encoded: Sequence[Encoded], *, pad: int = 0) -> Side:
    """Pad to the longest, on the right: ids `pad`, not real, not special."""
    longest = max(len(sentence.ids) for sentence in encoded)
    ids = torch.full((len(encoded), longest), pad, dtype=torch.long)
    real, special = torch.zeros_like(ids, dtype=torch.bool), torch.zeros_like(ids, dtype=torch.bool)
    for row, sentence in enumerate(encoded):
        ids[row, : len(sentence.ids)] = torch.tensor(sentence.ids, dtype=torch.long)
        real[row, : len(sentence.ids)] = True
        special[row, : len(sentence.ids)] = torch.tensor(sentence.special, dtype=torch.bool)
    return Side(ids, real, special)
