"""Reading CSV tables, with checks of their columns; errors of one line."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import numpy as np
import pandas as pd

from headscope.errors import DataError, HeadscopeError
from headscope.files.reading import is_regular

MOST_BYTES = 1 << 30


def read_csv(
    file: Path | TextIO,
    *,
    columns: Iterable[str] = (),
    texts: Iterable[str] = (),
    error: type[HeadscopeError] = DataError,
    name: str = "",
    advice: str = "",
) -> pd.DataFrame:
    """A table with at least `columns`: text in those among `texts` (empty for empty cells), numbers in the others.

    `error` for another file, for infinite numbers, and where `columns` are named for columns of numbers among which
    something else stands; its message calls the file `name` and ends with `advice`. Further columns may hold texts.
    """
    file_name, hint = name or str(file), f"; {advice}" if advice else ""
    required, words = list(columns), list(texts)
    if isinstance(file, Path) and not file.exists():
        raise error(f"there is no file {file_name}")
    if isinstance(file, Path) and not (is_regular(file) and file.stat().st_size <= MOST_BYTES):
        raise error(f"{file_name} is no file of at most {MOST_BYTES:,} bytes{hint}")
    try:
        table = pd.read_csv(file, dtype=dict.fromkeys(words, str), encoding="utf-8", low_memory=False)
    except (ValueError, OSError, OverflowError, MemoryError) as failed:  # pandas' own errors are ValueErrors
        raise error(f"{file_name} is malformed ({' '.join(str(failed).split())[:160]}){hint}") from None
    if lacking := [column for column in required if column not in table.columns]:
        raise error(f"{file_name} is malformed: it has no column {', '.join(lacking)}{hint}")
    wrong = [column for column in required if column not in words and not pd.api.types.is_numeric_dtype(table[column])]
    if wrong and len(table):
        raise error(f"{file_name} is malformed: column {', '.join(wrong)} must hold numbers{hint}")
    others = [str(column) for column in table if required and column not in words]
    if damaged := [column for column in others if _is_damaged(table, column)]:
        raise error(f"{file_name} is malformed: column {damaged[0][:60]} must hold numbers, once{hint}")
    if infinite := [str(column) for column in table.select_dtypes("number") if np.isinf(table[column]).any()]:
        raise error(f"{file_name} is malformed: column {infinite[0][:60]} holds infinite numbers{hint}")
    return table.fillna({column: "" for column in words if column in table.columns})


def _is_damaged(table: pd.DataFrame, column: str) -> bool:
    """Whether a column holds texts beside numbers, or instead of the bounds of numbers, or is there twice."""
    name, _, copy = column.rpartition(".")
    if copy.isdigit() and name in table.columns:  # pandas' names for columns of one name
        return True
    values = table[column].dropna()
    if pd.api.types.is_numeric_dtype(values) or not len(values):
        return False
    bounds = column.endswith(("_low", "_high")) and column.rpartition("_")[0] in table.columns
    return bounds or bool(pd.to_numeric(values, errors="coerce").notna().any())
