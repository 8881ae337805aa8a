"""A row of attention weights from first principles: one query, one key at a time."""

from math import exp, tanh

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def row(
    query: Array,
    keys: Array,
    visible: npt.NDArray[np.bool_],
    *,
    scaling: float,
    softcap: float | None = None,
    bias: Array | None = None,
    sink: float | None = None,
) -> list[float]:
    """The weights of one query [k] on keys [s k], with what the sink takes left out."""
    scores = []
    for index, key in enumerate(keys):
        score = scaling * sum(float(a) * float(b) for a, b in zip(query, key, strict=True))
        score = score if softcap is None else softcap * tanh(score / softcap)
        scores.append(score + (0.0 if bias is None else float(bias[index])))
    shares = [exp(score) if is_visible else 0.0 for score, is_visible in zip(scores, visible, strict=True)]
    total = sum(shares) + (0.0 if sink is None else exp(sink))
    return [share / total for share in shares]
