"""The MHR fork's confidence of one sentence's heads, cell by cell."""

import numpy as np
from numpy.typing import NDArray


def sentence_score(method: str, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """`base`, `advanced` or `pairwise` of weights [h t s]; the last query's weight on the last key counts as 0."""
    h, t, s = weights.shape
    maps = [[[float(weights[i, q, k]) if (q, k) != (t - 1, s - 1) else 0.0 for k in range(s)] for q in range(t)]
            for i in range(h)]  # fmt: skip
    if method == "base":
        return np.array([max(max(row) for row in each) for each in maps])
    if method == "advanced":
        return np.array([sum(max(each[q][k] for q in range(t)) for k in range(s)) / (s - 1) for each in maps])
    apart = [
        [sum((maps[i][q][k] - maps[j][q][k]) ** 2 for q in range(t) for k in range(s)) ** 0.5 for j in range(h)]
        for i in range(h)
    ]
    return np.array([sum(row) for row in apart])
