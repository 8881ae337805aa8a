"""Voita's rule for whole batches, without going through their padding: sentences of like length go together.

What a sentence takes grows with the square of its length and more, padding included, so that one long sentence would
make a batch of short ones several times as dear. The rule treats every sentence by itself: the numbers are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.data.encoded import Batch
from headscope.formats.base import Checkpoint
from headscope.model.threads import MOST, parallel_map
from headscope.relevance.readout import Relevance
from headscope.relevance.rulesets import Explanation, Target
from headscope.relevance.voita.voita import BLOCK_BYTES, VoitaRelevance, recorded_voita
from headscope.relevance.voita.voita_rules import VoitaSettings

LIKE = 0.75
"""Sentences of at least this share of the longest go together."""
PAIRS = 2**12
"""Pairs of an explained position and a position, over all sentences of a group: states of so many stay in the cache."""


def explain_batch(
    checkpoint: Checkpoint, batch: Batch, *, settings: VoitaSettings, target: Target = "top1"
) -> Explanation:
    """Relevance of every head; counts and values [p b] are 1 where something is explained: the indicator, no logit.

    On a CPU groups of sentences go back side by side, each on threads of its own.
    """
    on_cpu = checkpoint.device.type == "cpu"
    groups = like_lengths(_lengths(batch), pairs=PAIRS if on_cpu else None)
    recorded = [
        recorded_voita(checkpoint, batch.rows(rows.to(batch.source.ids.device)), settings=settings, target=target)
        for rows in groups
    ]
    block = BLOCK_BYTES // min(len(groups), MOST)
    if on_cpu:
        found = parallel_map(lambda each: each.explained(block, neurons=False), recorded)
    else:
        found = [each.explained(block, neurons=False) for each in recorded]
    return _together(found, groups)


def like_lengths(lengths: Sequence[int], *, pairs: int | None) -> list[Tensor]:
    """Numbers of sentences that go together, the longest first: of like length, with at most so many `pairs`."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        full = bool(groups) and pairs is not None and (len(groups[-1]) + 1) * longest**2 > pairs
        if not groups or full or lengths[number] < LIKE * longest:
            groups.append([])
            longest = lengths[number]
        groups[-1].append(number)
    return [torch.tensor(group) for group in groups]


def _lengths(batch: Batch) -> list[int]:
    """Of the longer side of every sentence."""
    sides = [side.real.sum(dim=1) for side in (batch.source, batch.target) if side is not None]
    found: list[int] = torch.stack(sides).amax(dim=0).tolist()
    return found


def _together(parts: Sequence[VoitaRelevance], groups: Sequence[Tensor]) -> Explanation:
    """The sentences of all groups in the order of the batch; positions that a group has not are not explained."""
    places = parts[0].heads
    counts = _columns([part.explained.float() for part in parts], groups)
    heads = {
        place: Relevance(
            raw=_columns([part.heads[place].raw for part in parts], groups),
            absolute=_columns([part.heads[place].absolute for part in parts], groups),
            by_query=_columns([part.heads[place].by_query for part in parts], groups),
            value_share=_columns_if_any([part.heads[place].value_share for part in parts], groups),
            qk_share=_columns_if_any([part.heads[place].qk_share for part in parts], groups),
        )
        for place in places
    }
    return Explanation(heads, counts, counts)


def _columns_if_any(parts: Sequence[Tensor | None], groups: Sequence[Tensor]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return _columns(there, groups) if len(there) == len(parts) else None


def _columns(parts: Sequence[Tensor], groups: Sequence[Tensor]) -> Tensor:
    """Parts [p b …] of different numbers of positions as one tensor, its second axis in the order of the batch."""
    ends = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    ends[1] = sum(len(group) for group in groups)
    found = parts[0].new_zeros(ends)
    for part, group in zip(parts, groups, strict=True):
        rows = found[: part.shape[0]]
        inner: Any = (slice(None), group.to(part.device), *(slice(size) for size in part.shape[2:]))
        rows[inner] = part
    return found
