"""Attention weights of a few short sentences, kept with a run: what its page draws, and nothing else needs.

`examples.npz` has the weights of every head as bytes (0 … 255 for 0 … 1): `{number}/{site}` is an array [n t s], heads
in the order of layers. `index` is JSON: of every sentence its line in the corpus, its texts and its subwords.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Example:
    """One sentence: its texts and subwords by side ("source", "target"), and weights [n t s] of the heads by site."""

    number: int
    texts: Mapping[str, str]
    subwords: Mapping[str, Sequence[str]]
    weights: Mapping[str, Bytes] = field(default_factory=dict)


def as_arrays(chosen: Sequence[Example]) -> dict[str, Bytes]:
    """The content of examples.npz."""
    index = [{"number": e.number, "texts": dict(e.texts), "subwords": dict(e.subwords)} for e in chosen]
    arrays = {f"{place}/{site}": weights for place, e in enumerate(chosen) for site, weights in e.weights.items()}
    return {"index": np.frombuffer(json.dumps(index).encode(), dtype=np.uint8), **arrays}
