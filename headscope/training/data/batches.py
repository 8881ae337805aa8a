"""Ids of a whole corpus in two flat arrays, and batches of it: sorted by length, cut by tokens, shuffled by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from headscope.data.batching import groups
from headscope.data.encoded import IGNORED

Ids = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedTexts:
    """Id sequences one after another: text i is `ids[bounds[i]:bounds[i + 1]]`."""

    ids: Ids
    bounds: Numbers

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]]) -> TokenizedTexts:
        """From lists of ids."""
        bounds = np.cumsum([0, *map(len, texts)], dtype=np.int64)
        flat = np.fromiter((number for text in texts for number in text), dtype=np.int32, count=int(bounds[-1]))
        return cls(flat, bounds)

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, number: int) -> Ids:
        return self.ids[self.bounds[number] : self.bounds[number + 1]]

    @property
    def lengths(self) -> Numbers:
        """Number of ids of every text."""
        return np.diff(self.bounds)


@dataclass(frozen=True)
class TrainingPairs:
    """What is trained on: encoder inputs (None for language models) and texts that the decoder must say.

    Neither holds special ids of its sides yet, but `around` does: encoder inputs get `prefix` and `suffix`,
    decoder inputs begin with `start`, labels close with `end`. `lines` [i] are line numbers of the files, from 1.
    `pads` are the ids of padding of encoder and decoder.
    """

    source: TokenizedTexts | None
    target: TokenizedTexts
    lines: Numbers
    start: int
    end: int
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    closed: bool = True
    pads: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.target)

    def lengths(self) -> tuple[Numbers, Numbers]:
        """Positions that every pair takes on either side."""
        target = self.target.lengths + int(self.closed)
        if self.source is None:
            return target, target
        return self.source.lengths + len(self.prefix) + len(self.suffix), target


@dataclass(frozen=True)
class TrainingBatch:
    """Sentences that go through the model together.

    source [b s] (None for language models), target [b t] the decoder's inputs, labels [b t] what it must say
    (`IGNORED` at padding); all are padded on the right. Masks are True for real tokens, None where nothing is
    padding. `lines` are the sentences' line numbers, `tokens` is how many labels there are.
    """

    source: Tensor | None
    source_mask: Tensor | None
    target: Tensor
    target_mask: Tensor | None
    labels: Tensor
    lines: tuple[int, ...]
    tokens: int

    def __len__(self) -> int:
        return len(self.lines)

    def to(self, device: torch.device) -> TrainingBatch:
        """The same on another device."""
        if device.type == "cpu":
            return self
        moved: dict[str, Any] = {
            name: value.to(device, non_blocking=True) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def empty(self) -> TrainingBatch:
        """The same sentences with nothing to learn from them, for a process that has no batch left."""
        return replace(self, labels=torch.full_like(self.labels, IGNORED), lines=(), tokens=0)


def plan_lengths(source: Numbers, target: Numbers, *, tokens: int, chance: np.random.Generator | None) -> list[Numbers]:
    """Which sentences of these lengths go together; `chance` orders ties and batches (None: as they stand)."""
    order = np.arange(len(target)) if chance is None else chance.permutation(len(target))
    order = order[np.argsort(source[order], kind="stable")]
    order = order[np.argsort(target[order], kind="stable")]
    cut = [np.array(group) for group in groups(order.tolist(), np.maximum(source, target).__getitem__, tokens)]
    return cut if chance is None else [cut[number] for number in chance.permutation(len(cut))]


def plan_batches(pairs: TrainingPairs, *, tokens: int, chance: np.random.Generator | None) -> list[Numbers]:
    """Which sentences go together, see `plan_lengths`."""
    return plan_lengths(*pairs.lengths(), tokens=tokens, chance=chance)


def epoch_plan(pairs: TrainingPairs, *, tokens: int, seed: int, epoch: int) -> list[Numbers]:
    """The batches of an epoch: the same for the same seed and epoch, whatever came before."""
    return plan_batches(pairs, tokens=tokens, chance=np.random.default_rng([seed, epoch]))


def collate(pairs: TrainingPairs, numbers: Numbers) -> TrainingBatch:
    """The batch of some sentences."""
    target_ids = [pairs.target[int(number)] for number in numbers]
    labels = [np.append(ids, pairs.end) for ids in target_ids] if pairs.closed else target_ids
    target, target_mask = _padded([np.insert(ids[:-1], 0, pairs.start) for ids in labels], fill=pairs.pads[1])
    source, source_mask = None, None
    if pairs.source is not None:
        read = [np.concatenate([pairs.prefix, pairs.source[int(n)], pairs.suffix]) for n in numbers]
        source, source_mask = _padded(read, fill=pairs.pads[0])
    padded_labels, _ = _padded(labels, fill=IGNORED)
    lines = tuple(int(pairs.lines[number]) for number in numbers)
    return TrainingBatch(source, source_mask, target, target_mask, padded_labels, lines, sum(map(len, labels)))


def _padded(rows: Sequence[npt.NDArray[Any]], *, fill: int) -> tuple[Tensor, Tensor | None]:
    """Rows as one tensor, padded on the right, and which of its cells are real (None: all)."""
    lengths = np.array([len(row) for row in rows])
    table = np.full((len(rows), int(lengths.max())), fill, dtype=np.int64)
    real = np.arange(table.shape[1]) < lengths[:, None]
    table[real] = np.concatenate(rows)
    return torch.from_numpy(table), None if real.all() else torch.from_numpy(real)
