"""Example sentences with the attention of every head, packed for the page's script."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from headscope.files.tables import Bytes, Example
from headscope.results.study import sides_of

LEVELS = 63
"""Steps from 0 to 1: weights are (step / levels)², so that small ones are told apart."""
ROOM = 6_000_000
"""Letters of the page that all weights may take."""
FAINT = 0.01  # weights below are 0


def examples_data(examples: Sequence[Example]) -> dict[str, Any] | None:
    """The sentences with their weights, as many as there is room for; `percents` are the texts of the levels."""
    if not examples:
        return None
    packed = [_packed(example) for example in examples]
    sizes = [sum(len(site["packed"]) for site in sentence["sites"].values()) for sentence in packed]
    fitting = int((np.cumsum(sizes) <= ROOM).sum())
    percents = [f"{(step / LEVELS) ** 2:.0%}".replace("%", " %") for step in range(LEVELS + 1)]
    return {"percents": percents, "sentences": packed[:fitting], "left_out": len(packed) - fitting}


def _packed(example: Example) -> dict[str, Any]:
    sides = {side: list(subwords) for side, subwords in example.subwords.items()}
    sites = {
        site: {"sides": list(sides_of(site, sides)), "packed": pack(weights)}
        for site, weights in example.weights.items()
    }
    return {"line": example.number + 1, "texts": dict(example.texts), "subwords": sides, "sites": sites}


def pack(weights: Bytes) -> str:
    """Weights [n t s] as bytes 0 … 255 in steps, deflated, in base64."""
    # without a search for repetitions, of which attention has none: a hundred times as fast, and smaller
    stream = zlib.compressobj(strategy=zlib.Z_HUFFMAN_ONLY)
    deflated = stream.compress(_STEPS[weights].tobytes()) + stream.flush()
    return base64.b64encode(deflated).decode("ascii")


_SHARES = np.arange(256) / 255
_STEPS = np.where(_SHARES < FAINT, 0, np.maximum(np.round(LEVELS * np.sqrt(_SHARES)), 1)).astype(np.uint8)
"""The step of every byte."""
