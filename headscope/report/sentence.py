"""The attention weights of one sentence, recomputed with the run's own checkpoint for a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headscope.heads import HeadId
from headscope.report.run import Run


@dataclass(frozen=True)
class SentenceAttention:
    """What `attention_figure` draws: weights [n t s] of n heads, and the pieces on their two axes."""

    weights: NDArray[np.floating]
    pieces_t: list[str]
    pieces_s: list[str]
    names: list[str]


def sentence_attention(
    run: Run,
    *,
    sentence: str | None = None,
    index: int | None = None,
    target: str | None = None,
    heads: Sequence[HeadId],
) -> SentenceAttention:
    """Open the run's checkpoint and capture `heads` (all of one site) on one sentence.

    Either `sentence` is given, or `index`, the line of the run's own data from 0; `target` is the
    other side for models that have one.
    """
    raise NotImplementedError("attention of one sentence needs the model part, which is not written yet")
