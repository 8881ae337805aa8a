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
    values = sorted(absolute.flatten().tolist())
    median = values[(len(values) - 1) // 2]
    return [n for n, row in enumerate(absolute) if max(row) > magnitude and max(row) >= ratio * median]


def terms(
    checkpoint: Checkpoint, example: Example, *, magnitude: float, ratio: float, special: tuple[int, ...]
) -> tuple[dict[tuple[SiteLayer, int], list[tuple[float, float]]], dict[SiteLayer, list[int]]]:
    """By head, of every query that sees a massive token beside itself, its weight on such tokens and their share.

    And the massive positions of every layer.
    """
    model: Any = checkpoint.model
    with torch.no_grad(), capture(model, ("weights",)) as record:
        states = model(input_ids=torch.tensor([example.source]), output_hidden_states=True).hidden_states
    rows: dict[tuple[SiteLayer, int], list[tuple[float, float]]] = {}
    massive: dict[SiteLayer, list[int]] = {}
    for site_layer, heads in checkpoint.layout.items():
        massive[site_layer] = tokens(states[site_layer[1]][0].numpy(), magnitude=magnitude, ratio=ratio)
        for head in range(heads):
            w = record[site_layer]["weights"][0, head].tolist()
            for t, number in enumerate(example.source):
                sees = range(t + 1) if site_layer[0] is Site.DECODER_SELF else range(len(example.source))
                keys = [s for s in massive[site_layer] if s in sees and s != t]
                if number not in special and keys:
                    rows.setdefault((site_layer, head), []).append((sum(w[t][s] for s in keys), len(keys) / len(sees)))
    return rows, massive
