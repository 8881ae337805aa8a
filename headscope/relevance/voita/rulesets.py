"""Voita's rule for whole batches: sentences of similar length are explained together, without the batch's padding.

What a sentence takes grows with the square of its length and more, padding included, so that one long sentence would
make a batch of short ones several times as expensive. The rule treats every sentence by itself: the numbers are the
same.

The rule sets: `voita` is the program's default; the others are its other modes and versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from headscope.data.encoded import Batch
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.threads import MOST, parallel_map
from headscope.relevance.rulesets import Explanation, Relevance, RuleSet, Steps, Target, register
from headscope.relevance.voita.explain import BLOCK_BYTES, RecordedTrace, VoitaRelevance, recorded_voita
from headscope.relevance.voita.rules import VoitaSettings

SIMILAR = 0.75
"""Sentences of at least this share of the longest are grouped."""
PAIRS = 2**12
"""Pairs of an explained position and a position, over all sentences of a group: states of so many stay in the cache."""


def explain_batch(
    checkpoint: Checkpoint, batch: Batch, *, settings: VoitaSettings, target: Target = "top1"
) -> Explanation:
    """Relevance of every head; counts and values [p b] are 1 where something is explained: the indicator, no logit.

    On a CPU groups of sentences are propagated in parallel, each on threads of its own.
    """
    on_cpu = checkpoint.device.type == "cpu"
    # the longer side of every sentence
    sides = [side.real.sum(dim=1) for side in (batch.source, batch.target) if side is not None]
    lengths: list[int] = torch.stack(sides).amax(dim=0).tolist()
    groups = length_groups(lengths, pairs=PAIRS if on_cpu else None)
    recorded = [
        recorded_voita(checkpoint, batch.rows(rows.to(batch.source.ids.device)), settings=settings, target=target)
        for rows in groups
    ]
    block = BLOCK_BYTES // min(len(groups), MOST)

    def explained(trace: RecordedTrace) -> VoitaRelevance:
        return trace.explained(block, neurons=False)

    return _joined_groups(parallel_map(explained, recorded) if on_cpu else list(map(explained, recorded)), groups)


def length_groups(lengths: Sequence[int], *, pairs: int | None) -> list[Tensor]:
    """Numbers of sentences of similar length, the longest first, with at most so many `pairs` a group."""
    groups: list[list[int]] = []
    longest = 0
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        full = bool(groups) and pairs is not None and (len(groups[-1]) + 1) * longest**2 > pairs
        if not groups or full or lengths[number] < SIMILAR * longest:
            groups.append([])
            longest = lengths[number]
        groups[-1].append(number)
    return [torch.tensor(group) for group in groups]


def _joined_groups(parts: Sequence[VoitaRelevance], groups: Sequence[Tensor]) -> Explanation:
    """The sentences of all groups in the order of the batch; positions beyond those of a group are not explained."""
    counts = _scattered([part.explained.float() for part in parts], groups)

    def joined(layer: tuple[Site, int], name: str) -> Any:
        columns = [getattr(part.heads[layer], name) for part in parts]
        return None if any(column is None for column in columns) else _scattered(columns, groups)

    names = [field.name for field in fields(Relevance)]
    heads = {layer: Relevance(*(joined(layer, name) for name in names)) for layer in parts[0].heads}
    return Explanation(heads, counts, counts)


def _scattered(parts: Sequence[Tensor], groups: Sequence[Tensor]) -> Tensor:
    """Parts [p b …] of different numbers of positions as one tensor, its second axis in the order of the batch."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    shape[1] = sum(len(group) for group in groups)
    joined = parts[0].new_zeros(shape)
    for part, group in zip(parts, groups, strict=True):
        index: Any = (slice(None), group.to(part.device), *(slice(size) for size in part.shape[2:]))
        joined[: part.shape[0]][index] = part
    return joined


@dataclass(frozen=True)
class Voita(RuleSet):
    """Starts from an indicator at each position; rescaling is not linear, so positions are explained one by one."""

    name: str
    summary: str
    settings: VoitaSettings = field(default_factory=VoitaSettings)
    linear = False
    steps = "each"

    def applies(self, checkpoint: Checkpoint, *, has_target: bool) -> str | None:
        return None

    def explain(self, checkpoint: Checkpoint, batch: Batch, *, target: Target, steps: Steps) -> Explanation:
        """`values` are 1 where something is explained: the indicator, not a logit."""
        if steps != "each":
            raise ConfigError(f"{self.name} is not linear, it explains each position by itself; choose steps 'each'")
        return explain_batch(checkpoint, batch, settings=self.settings, target=target)


for name, summary, settings in (
    ("voita", "LRP as in Voita et al.'s program, 2021: alpha-beta rule on exact Jacobians", VoitaSettings()),
    ("voita-constant", "the same with attention weights as constants", VoitaSettings(attention_constant=True)),
    ("voita-eps", "the same in its signed mode (ill-conditioned at norms)", VoitaSettings(mode="eps")),
    (
        "voita-eps-constant",
        "the signed mode with attention weights as constants",
        VoitaSettings(mode="eps", attention_constant=True),
    ),
    ("voita-2019", "the program as first published; superseded", VoitaSettings(version="2019")),
    ("voita-paper", "contribution ratios of the paper's appendix A", VoitaSettings(version="paper")),
):
    register(Voita(name, summary, settings))
