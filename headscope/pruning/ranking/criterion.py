"""The contract of a pruning criterion, and the registry that finds it by name.

A criterion scores heads: the higher the score, the longer the head stays. It is one file in
`headscope/pruning/ranking/criteria/`; most of them name a column of `heads.csv` and which end of it matters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from headscope.data.batching import BatchingOptions
from headscope.data.corpus import Corpus
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.engine.plan import analyze, choose_analyses
from headscope.errors import ConfigError
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId
from headscope.model.gating import masked
from headscope.registry import Registry, unknown

REPLICATES = 2  # intervals are not looked at


@dataclass(frozen=True)
class ScoringContext:
    """What a criterion is asked about: a model on a text (None: there is none), with heads that are gone already.

    Only `candidates` may go (None: all heads), which matters where a head is judged with others gone. `kept` holds what
    several criteria measure alike, for as long as the context is used.
    """

    checkpoint: Checkpoint
    corpus: Corpus | None = None
    batching: BatchingOptions = field(default_factory=BatchingOptions)
    options: RunOptions = field(default_factory=RunOptions)
    removed: Sequence[HeadId] = ()
    candidates: frozenset[HeadId] | None = None
    kept: dict[Hashable, Any] = field(default_factory=dict, init=False, compare=False, repr=False)


class Criterion(ABC):
    """Scores every head of a model. `reads_text` says whether it needs a text; `changes` whether scores depend on
    which heads are gone, so that scoring anew means something.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reads_text: ClassVar[bool] = True
    changes: ClassVar[bool] = True

    @abstractmethod
    def scores(self, context: ScoringContext) -> Scores:
        """A number for every head, higher is kept; NaN where there is none."""


class MeasuredColumn(Criterion):
    """A column of `heads.csv` that an analysis gives; `sign` −1 where low values are kept."""

    column: ClassVar[str]
    analysis: ClassVar[str]
    sign: ClassVar[float] = 1.0

    def scores(self, context: ScoringContext) -> Scores:
        """Runs the analysis on the text, with the heads that are gone masked."""
        corpus = context.corpus or Corpus("no text", 0, "", lambda: iter(()))
        with masked(context.checkpoint.model, context.removed):
            study = analyze(
                context.checkpoint,
                corpus,
                analyses=choose_analyses(only=[self.analysis]),
                options=context.options,
                batching=context.batching,
                replicates=REPLICATES,
            )
        return self.of(study.heads)

    def of(self, heads: pd.DataFrame) -> Scores:
        """The scores that a table of heads holds; ConfigError where it lacks the column."""
        if self.column not in heads or not pd.api.types.is_numeric_dtype(heads[self.column]):
            raise ConfigError(f"there is no column {self.column!r} of numbers; there are {', '.join(columns(heads))}")
        values = (heads[self.column].to_numpy(dtype=float) * self.sign).tolist()
        return dict(zip(heads_of_rows(heads), values, strict=True))


def columns(heads: pd.DataFrame) -> list[str]:
    """The columns that heads can be ranked by."""
    numeric = [name for name in heads.columns if pd.api.types.is_numeric_dtype(heads[name])]
    return [name for name in numeric if name not in ("layer", "head") and not name.endswith(("_low", "_high"))]


CRITERIA: Registry[type[Criterion]] = Registry(
    "criterion", package="headscope.pruning.ranking.criteria", group="headscope.criteria"
)


def criterion(cls: type[Criterion]) -> type[Criterion]:
    """Register a criterion under its `name`."""
    return CRITERIA.register(cls.name, cls, where=cls.__module__)


def criterion_named(name: str) -> Criterion:
    """The criterion of that name, or that column of `heads.csv` (higher is kept).

    ConfigError for a name that neither a criterion nor an analysis has, with the nearest one.
    """
    if name in CRITERIA.names():
        return CRITERIA.get(name)()
    measured = column_named(name)
    if measured.analysis not in ANALYSES.names():
        known = sorted({*CRITERIA.names(), *ANALYSES.names()})
        raise ConfigError(f"{unknown('criterion', name, known)}; other columns of heads.csv: give --from RUN")
    return measured


def column_named(name: str) -> MeasuredColumn:
    """The column of that name, as its criterion says or higher is kept; it may be one that no analysis gives."""
    for criterion, cls in CRITERIA:
        if criterion == name and issubclass(cls, MeasuredColumn):
            return cls()
    giving = [analysis for analysis in ANALYSES.names() if name == analysis or name.startswith(f"{analysis}_")]
    analysis = max(giving, key=len, default=name)
    text = not giving or bool(ANALYSES.get(analysis).passes)
    measured: MeasuredColumn = type(
        "Column", (MeasuredColumn,), {"name": name, "column": name, "analysis": analysis, "reads_text": text}
    )()
    return measured
