"""Results of the analyses of a checkpoint on a text."""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

from headscope.bootstrap import Array
from headscope.data.batching import Omissions
from headscope.heads import HeadId


@dataclass(frozen=True)
class LeftOut:
    """An analysis, or a site of it, that was not measured, and why."""

    analysis: str
    why: str


@dataclass
class AnalysisResult:
    """Everything measured: a row per head, the analyses' own tables and arrays, labels, and what was left out.

    `unsupported` are labels that lack evidence, each with the reason; `files` are texts for other programs, by their
    path in a run. `streamed` is the number of sentences whose attention weights were not made as matrices.
    """

    heads: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, Array]
    labels: dict[HeadId, list[str]]
    unsupported: dict[HeadId, list[str]]
    left_out: list[LeftOut]
    remarks: list[str]
    signatures: dict[str, dict[str, str]]
    detail: dict[str, dict[str, Array]]
    losses: Omissions
    sentences: int
    complete: bool
    seconds: float
    files: dict[str, str] = field(default_factory=dict)
    streamed: int = 0
