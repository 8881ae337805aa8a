"""Statistics of attention rows from first principles: one query, one key at a time."""

from __future__ import annotations

from math import exp, log, tanh
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


class Row(NamedTuple):
    """ln Σ exp(scores), entropy, largest counted weight and its first place."""

    log_sum: float
    entropy: float
    max_weight: float
    argmax: int


def row(
    query: Array,
    keys: Array,
    visible: npt.NDArray[np.bool_],
    counted: npt.NDArray[np.bool_],
    *,
    scaling: float,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: float | None = None,
) -> Row:
    """Of one query [k] over keys [s k]; entropy is −Σ w ln w of the weights beside the sink's."""
    scores = []
    for place, key in enumerate(keys):
        score = scaling * sum(float(a) * float(b) for a, b in zip(query, key, strict=True))
        score = score if softcap is None else softcap * tanh(score / softcap)
        scores.append(score + (0.0 if bias is None else float(bias[place])))
    seen = [place for place in range(len(keys)) if visible[place]]
    total = sum(exp(scores[place]) for place in seen) + (0.0 if sink is None else exp(sink))
    weights = {place: exp(scores[place]) / total for place in seen}
    entropy = -sum(weight * log(weight) for weight in weights.values())
    best = max(weights[place] for place in seen if counted[place])
    first = next(place for place in seen if counted[place] and weights[place] >= best * (1 - 1e-12))
    return Row(log(total), entropy, best, first)
