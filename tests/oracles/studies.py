"""Options of runs of every analysis on tiny models, and every number of what they find."""

from __future__ import annotations

import numpy as np
import pandas as pd
import torch

from headscope.engine.result import AnalysisResult
from tests.oracles.run_options import run_options

RANKS = torch.tensor([(17 * number) % 53 * 13 for number in range(53)])

OPTIONS = run_options(
    ranks=RANKS,
    frequencies="made",
    parse="made",
    shapley_samples=1,
    ig_steps=3,
    massive_magnitude=1.0,
    massive_ratio=2.0,
    streaming_steps=2,
    streaming_lengths=(3, 9),
    passkeys=1,
    passkey_length=2,
    chg_fits=2,
    chg_steps=2,
)


def numbers(its: AnalysisResult) -> dict[str, np.ndarray]:
    """Every number of a study by name."""
    found = dict(its.arrays)
    for name, table in {"heads": its.heads, **its.tables}.items():
        for column in table.columns:
            if pd.api.types.is_numeric_dtype(table[column]):
                found[f"{name}.{column}"] = table[column].to_numpy(dtype=float)
    return found
