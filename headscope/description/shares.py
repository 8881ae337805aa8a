"""The share of every head that a description explains, on sentences that it was not fitted to."""

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
from headscope.description.sample import Laid

FOLDS, WATCHED_PARTS = 2, 5
MIN_ROOM = 0.01
"""Heads whose weights are nearer to even than this share of the entropy of even weights have nothing to explain."""
MIN_MASS = 1e-3
"""Mean weight on some keys below which it does not matter how it lies there."""


@dataclass(frozen=True)
class Explained:
    """Of every sentence (in the order of the blocks): what all groups up to one explain [b h], and what there is [b h].

    `position` are the probabilities [b n s h] of every block under the description by position alone, fitted to the
    other half of the sentences, times how much each row counts; `pairs` have E U and E V of both halves, where pairs of
    tokens were fitted. `unmet` are gained and room [b h] among keys that met the query's token nowhere in the other
    half, under all groups. Both are zero for heads that have nothing to explain, there or anywhere.
    """

    sentences: Tensor
    gains: Mapping[str, Tensor]
    room: Tensor
    position: Sequence[Tensor]
    pairs: Sequence[Tables]
    unmet: tuple[Tensor, Tensor]


def explain_shares(stack: Laid, *, steps: int = STEPS, step: Callable[[int], None] = lambda fits: None) -> Explained:
    """Fit all heads to each half of the sentences, group by group, and look at the other half.

    Nothing is chosen there: of the half that a description is fitted to, each fifth sentence only says at which of the
    steps, and with which ridge of pairs, to stop, so a group that does not help is not used. `step` is called after
    each fit: of `FOLDS` halves, every group of the inventory.
    """
    groups = stack.inventory.groups()
    halves = (_held_out(stack, half, steps, step) for half in range(FOLDS))
    gains, positions, tables, unmets = zip(*halves, strict=True)
    gain_by_group = {group: sum((gain[group] for gain in gains), torch.zeros(())) for group in groups}
    position = [sum(parts, torch.zeros(())) for parts in zip(*positions, strict=True)]
    pairs = [table for table in tables if table is not None]
    sentences = torch.cat([block.sentences for block in stack.blocks])
    even = torch.cat([block.even for block in stack.blocks])
    room = even - torch.cat([block.entropy for block in stack.blocks])
    informative = room.sum(dim=0) >= MIN_ROOM * even.sum(dim=0)  # [h]
    gain_by_group = {group: torch.where(informative, gain, 0.0) for group, gain in gain_by_group.items()}
    unmet_gained, unmet_room, unmet_even = sum(unmets, torch.zeros(()))
    least_even = unmet_even.sum(dim=0).maximum(MIN_MASS * even.sum(dim=0))
    present = informative & (unmet_room.sum(dim=0) >= MIN_ROOM * least_even)  # [h]
    unmet = torch.where(present, unmet_gained, 0.0), torch.where(present, unmet_room, 0.0)
    return Explained(sentences, gain_by_group, torch.where(informative, room, 0.0), position, pairs, unmet)


def _held_out(
    stack: Laid, half: int, steps: int, step: Callable[[int], None]
) -> tuple[Mapping[str, Tensor], Sequence[Tensor], Tables | None, Tensor]:
    """Fit all heads to one half, group after group, and look at the other after each.

    Gained, position and pairs as in `Explained`, and gained, room and even weights [3 b h] of keys that were not met;
    zero for the half that was fitted to.
    """
    fitting = [block.part(block.sentences % FOLDS == half) for block in stack.blocks]
    fitting = [block for block in fitting if len(block.sentences)]
    for_fit = [(block.sentences // FOLDS) % WATCHED_PARTS != WATCHED_PARTS - 1 for block in fitting]
    held_out = [block.sentences % FOLDS != half for block in stack.blocks]
    description, features_used = Description(torch.zeros(sum(stack.inventory.sizes), stack.heads)), list[int]()
    gain_by_group, position, token_vectors = dict[str, Tensor](), list[Tensor](), None
    for group in stack.inventory.groups():
        features_used += FEATURES[group]
        data = FitData(fitting, features_used, for_fit, stack.tables)
        description = _fit(description, data, steps, pairs=group == "lexical")
        token_vectors = description.project(stack.tables)
        gains = [
            (block.even - description.cross_entropy(block, features_used, token_vectors)) * rows[:, None]
            for block, rows in zip(stack.blocks, held_out, strict=True)
        ]
        gain_by_group[group] = torch.cat(gains)
        step(1)
        if group == "position":
            position = [
                description.log_probabilities(block, features_used, None).exp()
                * (block.mass * rows[:, None, None])[:, :, None]
                for block, rows in zip(stack.blocks, held_out, strict=True)
            ]
    known_words, unmet = torch.cat([_words(block)[block.visible] for block in fitting]).unique(), list[Tensor]()
    for block, rows in zip(stack.blocks, held_out, strict=True):
        new = block.visible & ~torch.isin(_words(block), known_words) & rows[:, None, None]
        unmet.append(
            torch.stack(among(block.weights, description.log_probabilities(block, features_used, token_vectors), new))
        )
    return gain_by_group, position, token_vectors, torch.cat(unmet, dim=1)


def among(weights: Tensor, logs: Tensor, is_some_key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U − CE, U − H and U [b h] of weights and ln p [b n s h] among `is_some_key` [b n s], summed over rows.

    Both are renormalised over these keys, and a row counts by the weight that it has there.
    """
    inside = is_some_key[..., None]
    mass = (weights * inside).sum(dim=2, keepdim=True)  # [b n 1 h]
    own = weights * inside / mass.clamp(min=torch.finfo(weights.dtype).tiny)
    even = is_some_key.sum(dim=-1).clamp(min=1).to(weights.dtype).log()[..., None]  # [b n 1]
    of_p = logs.masked_fill(~inside, FAR_BELOW).log_softmax(dim=2)
    gain = even + (own * of_p).sum(dim=2)  # [b n h]
    room = even + torch.special.xlogy(own, own).sum(dim=2)
    row_weights = mass[:, :, 0] * is_some_key.any(dim=-1)[..., None]
    return (gain * row_weights).sum(dim=1), (room * row_weights).sum(dim=1), (even * row_weights).sum(dim=1)


def _fit(description: Description, data: FitData, steps: int, *, pairs: bool) -> Description:
    """Go on from `description`; pairs of tokens begin at nothing, and take every ridge in turn."""
    if not pairs or not all(table.shape[1] for table in data.tables):
        return fit_description(description, data, steps=steps)
    description = with_pairs(description, data)
    for number, ridge in enumerate(PAIR_RIDGES):
        more = steps if number else 2 * steps
        description = fit_description(description, data, steps=more, pair_ridge=ridge)
    return description


def _words(block: Block) -> Tensor:
    """A number for the two tokens of every query and key [b n s]."""
    return block.queries[..., None] * (1 << 32) + block.keys[:, None]
