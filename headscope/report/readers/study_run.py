"""A study in memory as a run that figures can draw, without a folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.files.examples import Example
from headscope.report.readers.run import COLUMNS, AnalysisRun, MissingTable, read_table

Array = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class StudyRun(AnalysisRun):
    """Tables and similarity matrices that no file holds."""

    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    examples: Sequence[Example] = ()

    @cached_property
    def similarity(self) -> dict[str, Array]:
        if not self.arrays:
            raise MissingTable("the study has no similarity; analyze with only='similarity' or without only=")
        return {name: np.asarray(array, dtype=np.float64) for name, array in self.arrays.items()}

    def has_table(self, name: str) -> bool:
        return name in self.tables

    def _table(self, name: str, columns: tuple[str, ...], option: str) -> pd.DataFrame:
        if name not in self.tables:
            argument = f"also={name!r}" if option.startswith("--only") else f"{option.removeprefix('--')}=True"
            raise MissingTable(f"the study has no table {name!r}; analyze with {argument}")
        return _as_read(self.tables[name], name, columns)


def study_run(
    record: Mapping[str, Any],
    heads: pd.DataFrame,
    tables: Mapping[str, pd.DataFrame],
    arrays: Mapping[str, Array],
    examples: Sequence[Example] = (),
) -> StudyRun:
    """The run that its record (what `run.json` would say), heads, tables and similarity matrices make."""
    return StudyRun(Path("study"), record, _as_read(heads, "heads", COLUMNS["heads"]), tables, arrays, examples)


def _as_read(table: pd.DataFrame, name: str, columns: tuple[str, ...]) -> pd.DataFrame:
    """The table as it comes back from its file: figures of a study and of its folder are then the same."""
    return read_table(StringIO(table.to_csv(index=False)), columns=columns, name=f"the study's {name}")
