"""The share of every head's attention that a description explains, on held-out sentences."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.description.features import FEATURES
from headscope.description.loglinear import (
    FAR_BELOW,
    PAIR_RIDGES,
    STEPS,
    Block,
    Description,
    FitData,
    Tables,
    fit_description,
    with_pairs,
)
from headscope.description.sample import SampleBlocks

FOLDS, WATCHED_PARTS = 2, 5
MIN_ROOM = 0.01
"""A head has something to explain if the entropy of its weights is below that of even weights by this share of it."""
MIN_MASS = 1e-3
"""Mean weight on a set of keys below which its distribution there is ignored."""


@dataclass(frozen=True)
class ExplainedSums:
    """Gains of descriptions by sentence, in the order of the blocks, from which explained shares are made.

    `gains[group]` [b h] is U − CE under all groups up to that one, `room` [b h] is U − H, the most that there is to
    explain: U is the entropy of even weights, H that of the weights, CE their cross-entropy under the description.
    `position` has for every block the probabilities [b n s h] under position alone, times each row's mass; `pairs` the
    projections E U and E V of both halves, where pairs of tokens were fitted. `unmet` is (gain, room) among keys that
    never met the query's token in the fitted half, under all groups. Heads with nothing to explain have zeros.
    """

    sentences: Tensor
    gains: Mapping[str, Tensor]
    room: Tensor
    position: Sequence[Tensor]
    pairs: Sequence[Tables]
    unmet: tuple[Tensor, Tensor]


def explain_shares(
    sample: SampleBlocks, *, steps: int = STEPS, step: Callable[[int], None] = lambda fits: None
) -> ExplainedSums:
    """Fit descriptions of all heads to each half of the sentences, group by group, and evaluate them on the other half.

    The held-out half chooses nothing. Every fifth sentence of the fitted half is only watched: it decides at which
    step, and with which ridge of pairs, to stop, so that a group that does not help is not used. `step` is called after
    each fit, one for each half and group.
    """
    groups = sample.inventory.groups()
    halves = (_held_out(sample, half, steps, step) for half in range(FOLDS))
    gains, positions, tables, unmets = zip(*halves, strict=True)
    gain_by_group = {group: sum((gain[group] for gain in gains), torch.zeros(())) for group in groups}
    position = [sum(parts, torch.zeros(())) for parts in zip(*positions, strict=True)]
    pairs = [table for table in tables if table is not None]
    sentences = torch.cat([block.sentences for block in sample.blocks])
    even = torch.cat([block.even for block in sample.blocks])
    room = even - torch.cat([block.entropy for block in sample.blocks])
    has_room = room.sum(dim=0) >= MIN_ROOM * even.sum(dim=0)  # [h]
    gain_by_group = {group: torch.where(has_room, gain, 0.0) for group, gain in gain_by_group.items()}
    unmet_gain, unmet_room, unmet_even = sum(unmets, torch.zeros(()))
    least_even = unmet_even.sum(dim=0).maximum(MIN_MASS * even.sum(dim=0))
    has_unmet_room = has_room & (unmet_room.sum(dim=0) >= MIN_ROOM * least_even)  # [h]
    unmet = torch.where(has_unmet_room, unmet_gain, 0.0), torch.where(has_unmet_room, unmet_room, 0.0)
    return ExplainedSums(sentences, gain_by_group, torch.where(has_room, room, 0.0), position, pairs, unmet)


def _held_out(
    sample: SampleBlocks, half: int, steps: int, step: Callable[[int], None]
) -> tuple[Mapping[str, Tensor], Sequence[Tensor], Tables | None, Tensor]:
    """Fit descriptions of all heads to one half, group after group, and evaluate each on the other half.

    Returns gains, position and pairs as in `ExplainedSums`, and U − CE, U − H and U [3 b h] among unmet keys; all are
    zero for the fitted half.
    """
    fitting = [block.part(block.sentences % FOLDS == half) for block in sample.blocks]
    fitting = [block for block in fitting if len(block.sentences)]
    for_fit = [(block.sentences // FOLDS) % WATCHED_PARTS != WATCHED_PARTS - 1 for block in fitting]
    held_out = [block.sentences % FOLDS != half for block in sample.blocks]
    description, features_used = Description(torch.zeros(sum(sample.inventory.sizes), sample.heads)), list[int]()
    gain_by_group, position, token_vectors = dict[str, Tensor](), list[Tensor](), None
    for group in sample.inventory.groups():
        features_used += FEATURES[group]
        data = FitData(fitting, features_used, for_fit, sample.tables)
        description = _fit(description, data, steps, pairs=group == "lexical")
        token_vectors = description.project(sample.tables)
        gains = [
            (block.even - description.cross_entropy(block, features_used, token_vectors)) * rows[:, None]
            for block, rows in zip(sample.blocks, held_out, strict=True)
        ]
        gain_by_group[group] = torch.cat(gains)
        step(1)
        if group == "position":
            position = [
                description.log_probabilities(block, features_used, None).exp()
                * (block.mass * rows[:, None, None])[:, :, None]
                for block, rows in zip(sample.blocks, held_out, strict=True)
            ]
    met_pairs, unmet = torch.cat([_number_pairs(block)[block.visible] for block in fitting]).unique(), list[Tensor]()
    for block, rows in zip(sample.blocks, held_out, strict=True):
        is_unmet = block.visible & ~torch.isin(_number_pairs(block), met_pairs) & rows[:, None, None]
        logs = description.log_probabilities(block, features_used, token_vectors)
        unmet.append(torch.stack(among(block.weights, logs, is_unmet)))
    return gain_by_group, position, token_vectors, torch.cat(unmet, dim=1)


def among(weights: Tensor, logs: Tensor, is_some_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U − CE, U − H and U [b h] of weights and ln p [b n s h] on the keys `is_some_key` [b n s], summed over rows.

    Weights and p are renormalised over these keys, and each row is multiplied by its weight on them.
    """
    inside = is_some_key[..., None]
    mass = (weights * inside).sum(dim=2, keepdim=True)  # [b n 1 h]
    inside_weights = weights * inside / mass.clamp(min=torch.finfo(weights.dtype).tiny)
    even = is_some_key.sum(dim=-1).clamp(min=1).to(weights.dtype).log()[..., None]  # [b n 1]
    of_p = logs.masked_fill(~inside, FAR_BELOW).log_softmax(dim=2)
    gain = even + (inside_weights * of_p).sum(dim=2)  # [b n h]
    room = even + torch.special.xlogy(inside_weights, inside_weights).sum(dim=2)
    row_weights = mass[:, :, 0] * is_some_key.any(dim=-1)[..., None]
    return (gain * row_weights).sum(dim=1), (room * row_weights).sum(dim=1), (even * row_weights).sum(dim=1)


def _fit(description: Description, data: FitData, steps: int, *, pairs: bool) -> Description:
    """Fit a description further, from its present parameters; with `pairs` first add pairs, then try every ridge."""
    if not pairs or not all(table.shape[1] for table in data.tables):
        return fit_description(description, data, steps=steps)
    description = with_pairs(description, data)
    for number, ridge in enumerate(PAIR_RIDGES):
        more = steps if number else 2 * steps
        description = fit_description(description, data, steps=more, pair_ridge=ridge)
    return description


def _number_pairs(block: Block) -> Tensor:
    """A number for each pair of a query's and a key's token [b n s]."""
    return block.queries[..., None] * (1 << 32) + block.keys[:, None]
