"""Example sentences with the attention of every head, packed for the page's script."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from headscope.files.tables import Bytes, Example
from headscope.results.study import sides_of

LEVELS = (63, 15, 7)
"""Steps from 0 to 1, finest first: weights are (step / levels)², so that small ones are told apart."""
ROOM = 6_000_000
"""Letters of the page that all weights may take."""
FAINT = 0.01  # weights below are 0


def examples_data(examples: Sequence[Example]) -> dict[str, Any] | None:
    """The sentences with their weights in the finest levels for which there is room; `left_out` had none in any.

    `percents` are the texts of the levels.
    """
    if not examples:
        return None
    for levels in LEVELS:
        packed = [_packed(example, levels) for example in examples]
        if sum(map(_size, packed)) <= ROOM:
            break
    fitting = int((np.cumsum([_size(sentence) for sentence in packed]) <= ROOM).sum())
    percents = [f"{(step / levels) ** 2:.0%}".replace("%", " %") for step in range(levels + 1)]
    return {"percents": percents, "sentences": packed[:fitting], "left_out": len(packed) - fitting}


def _packed(example: Example, levels: int) -> dict[str, Any]:
    sides = {side: list(subwords) for side, subwords in example.subwords.items()}
    sites = {
        site: {"sides": list(sides_of(site, sides)), "packed": pack(weights, levels)}
        for site, weights in example.weights.items()
    }
    return {"line": example.number + 1, "texts": dict(example.texts), "subwords": sides, "sites": sites}


def pack(weights: Bytes, levels: int) -> str:
    """Weights [n t s] as bytes 0 … 255 in `levels` steps, deflated, in base64."""
    steps = _STEPS[levels][weights].tobytes()
    deflated = min((_deflated(steps, strategy) for strategy in (zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE)), key=len)
    return base64.b64encode(deflated).decode("ascii")


def _deflated(content: bytes, strategy: int) -> bytes:
    """Without a search for repetitions, of which attention has none: a hundred times as fast, and smaller."""
    stream = zlib.compressobj(strategy=strategy)
    return stream.compress(content) + stream.flush()


def _steps(levels: int) -> Bytes:
    """The step of every byte."""
    weights = np.arange(256) / 255
    return np.where(weights < FAINT, 0, np.maximum(np.round(levels * np.sqrt(weights)), 1)).astype(np.uint8)


_STEPS = {levels: _steps(levels) for levels in LEVELS}


def _size(sentence: dict[str, Any]) -> int:
    return sum(len(site["packed"]) for site in sentence["sites"].values())
