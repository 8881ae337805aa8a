"""Weights on tokens with massive activations, one sentence at a time, from transformers' own hidden states."""

from typing import Any

import numpy as np
import torch

from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer
from headscope.model.taps import capture
from tests.oracles.speakers import Example


def tokens(states: Any, *, magnitude: float, ratio: float) -> list[int]:
    """Positions of states [n d] that have an activation above both bounds."""
    absolute = np.abs(states)
    every = sorted(absolute.flatten().tolist())
    median = every[(len(every) - 1) // 2]
    return [n for n, row in enumerate(absolute) if max(row) > magnitude and max(row) >= ratio * median]


def terms(
    its: Checkpoint, one: Example, *, magnitude: float, ratio: float, special: tuple[int, ...]
) -> tuple[dict[tuple[SiteLayer, int], list[tuple[float, float]]], dict[SiteLayer, list[int]]]:
    """By head, of every query that sees a massive token beside itself, its weight on such tokens and their share.

    And the massive positions of every layer.
    """
    model: Any = its.model
    with torch.no_grad(), capture(model, ("weights",)) as captured:
        states = model(input_ids=torch.tensor([one.source]), output_hidden_states=True).hidden_states
    rows: dict[tuple[SiteLayer, int], list[tuple[float, float]]] = {}
    massive: dict[SiteLayer, list[int]] = {}
    for place, heads in its.layout.items():
        massive[place] = tokens(states[place[1]][0].numpy(), magnitude=magnitude, ratio=ratio)
        for head in range(heads):
            weights = captured[place]["weights"][0, head].tolist()
            for t, number in enumerate(one.source):
                seen = range(t + 1) if place[0] is Site.DECODER_SELF else range(len(one.source))
                keys = [s for s in massive[place] if s in seen and s != t]
                if number not in special and keys:
                    rows.setdefault((place, head), []).append((sum(weights[t][s] for s in keys), len(keys) / len(seen)))
    return rows, massive
