"""Tiny models, texts and options with which to test every analysis, and the numbers of its study."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import torch

from headscope.data.corpus import Corpus
from headscope.engine.base import ANALYSES, Analysis
from headscope.formats.huggingface.checkpoint import HuggingFaceCheckpoint
from headscope.results.study import Study
from tests.oracles import tiny
from tests.oracles.shuffled import in_folds

SENTENCES = 13
RANKS = torch.tensor([(17 * number) % 53 * 13 for number in range(53)])

OPTIONS: dict[str, Any] = {
    **{"ranks": RANKS, "frequencies": "made", "parse": "made", "shapley_samples": 1, "ig_steps": 3},
    **{"massive_magnitude": 1.0, "massive_ratio": 2.0, "explained_rows": 61, "explained_steps": 2},
    **{"streaming_steps": 2, "streaming_lengths": (3, 9), "passkeys": 1, "passkey_length": 2},
    **{"chg_fits": 2, "chg_steps": 2},
}


def load_tiny(kind: str, analysis: str = "", *, sentences: int = 5) -> tuple[HuggingFaceCheckpoint, Corpus]:
    """A checkpoint and a corpus, of so many `sentences` for analyses that make passes of their own."""
    explains = analysis and ANALYSES.get(analysis).explain is not Analysis.explain
    count = sentences if explains else SENTENCES
    return _load_cached(kind, count)


@cache
def _load_cached(kind: str, count: int) -> tuple[HuggingFaceCheckpoint, Corpus]:
    return tiny.checkpoint(kind, 7), in_folds(tiny.corpus(7, count=count, target=tiny.KINDS[kind].two_sided), 3)


def numbers(study: Study) -> dict[str, np.ndarray]:
    """Every number of a study by name."""
    values = dict(study.arrays)
    for name, table in {"heads": study.heads, **study.tables}.items():
        for column in table.columns:
            if pd.api.types.is_numeric_dtype(table[column]):
                values[f"{name}.{column}"] = table[column].to_numpy(dtype=float)
    return values
