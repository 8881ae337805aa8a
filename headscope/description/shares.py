"""How much of every head a description explains, on sentences that it was not fitted to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope.description.features import FEATURES
from headscope.description.loglinear import STEPS, Block, Description, Tables, fitted, with_pairs
from headscope.description.sample import Laid

FOLDS, WATCHED = 2, 5
LEAST_ROOM = 0.01
"""Heads whose weights are nearer to even than this share of the entropy of even weights have nothing to explain."""


@dataclass(frozen=True)
class Explained:
    """Of every sentence (in the order of the blocks): what all groups up to one explain [b h], and what there is [b h].

    `position` are the probabilities [b n s h] of every block under the description by position alone, fitted to the
    other half of the sentences; `pairs` have E U and E V of both halves, where pairs of tokens were fitted.
    """

    sentences: Tensor
    gained: Mapping[str, Tensor]
    room: Tensor
    position: Sequence[Tensor]
    pairs: Sequence[Tables]


def half_of(sentences: Tensor) -> Tensor:
    """Which half each sentence is in [b]."""
    return sentences % FOLDS


def explained(laid: Laid, *, steps: int = STEPS) -> Explained:
    """Fit all heads to each half of the sentences, group by group, and look at the other half.

    Nothing is chosen there: of the half that a description is fitted to, each fifth sentence only says at which of the
    steps to stop, so a group that does not help is not used.
    """
    groups = laid.inventory.groups()
    number = len(torch.cat([block.sentences for block in laid.blocks]))
    gained = {group: torch.zeros(number, laid.heads) for group in groups}
    position = [torch.zeros_like(block.weights) for block in laid.blocks]
    made: list[Tables] = []
    sentences = torch.cat([block.sentences for block in laid.blocks])
    for half in range(FOLDS):
        fitting = [_of_half(block, half) for block in laid.blocks]
        fitting = [block for block in fitting if len(block.sentences)]
        used: list[int] = []
        description = Description(torch.zeros(sum(laid.inventory.sizes), laid.heads))
        for group in groups:
            used += FEATURES[group]
            description = _fit(description, fitting, used, laid.tables, steps, pairs=group == "lexical")
            projected = description.projected(laid.tables)
            at = 0
            for number_of_block, block in enumerate(laid.blocks):
                held_out = half_of(block.sentences) != half
                gain = _even(block) - description.cross_entropy(block, used, projected)
                gained[group][at : at + len(gain)] += gain * held_out[:, None]
                if group == "position":
                    found = description.log_probabilities(block, used, None).exp()
                    position[number_of_block] += found * held_out[:, None, None, None]
                at += len(gain)
        if projected is not None:
            made.append(projected)
    room = torch.cat([block.room for block in laid.blocks])
    even = torch.cat([_even(block) for block in laid.blocks])
    informative = room.sum(dim=0) >= LEAST_ROOM * even.sum(dim=0)  # [h]
    gained = {group: torch.where(informative, gain, 0.0) for group, gain in gained.items()}
    return Explained(sentences, gained, torch.where(informative, room, 0.0), position, made)


def _fit(
    description: Description, blocks: Sequence[Block], used: Sequence[int], tables: Tables, steps: int, *, pairs: bool
) -> Description:
    """Go on from `description` with these features; pairs of tokens, which begin at nothing, have twice the steps."""
    chosen = [(block.sentences // FOLDS) % WATCHED != WATCHED - 1 for block in blocks]
    if pairs and tables[0].shape[1]:
        description, steps = with_pairs(description, blocks, used, chosen, tables), 2 * steps
    return fitted(description, blocks, used, chosen, tables, steps=steps)


def _even(block: Block) -> Tensor:
    """The cross-entropy of even weights, summed over the rows of each sentence [b 1]."""
    return (block.visible.sum(-1).clamp(min=1).to(block.weights.dtype).log() * block.counted).sum(-1)[:, None]


def _of_half(block: Block, half: int) -> Block:
    mine = half_of(block.sentences) == half
    names = ("weights", "visible", "queries", "keys", "counted", "sentences")
    return replace(block, features=block.features[:, mine], **{name: getattr(block, name)[mine] for name in names})
