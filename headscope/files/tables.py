"""CSV tables read back: columns that must be there, numbers that are numbers, one line for whatever is wrong."""

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
    """A table with at least `columns`, of which those among `texts` hold text (empty where the file is) and others
    numbers; no number of the table is infinite.

    `error` in one line, which calls the file `name` and ends with `advice`, for a file that is none.
    """
    where, hint = name or str(file), f"; {advice}" if advice else ""
    wanted, words = list(columns), list(texts)
    if isinstance(file, Path) and not file.exists():
        raise error(f"there is no file {where}")
    if isinstance(file, Path) and not (is_regular(file) and file.stat().st_size <= MOST_BYTES):
        raise error(f"{where} is no file of at most {MOST_BYTES:,} bytes{hint}")
    try:
        table = pd.read_csv(file, dtype=dict.fromkeys(words, str), encoding="utf-8", low_memory=False)
    except (ValueError, OSError, OverflowError, MemoryError) as failed:  # pandas' own errors are ValueErrors
        raise error(f"{where} is malformed ({' '.join(str(failed).split())[:160]}){hint}") from None
    if lacking := [each for each in wanted if each not in table.columns]:
        raise error(f"{where} is malformed: it has no column {', '.join(lacking)}{hint}")
    wrong = [each for each in wanted if each not in words and not pd.api.types.is_numeric_dtype(table[each])]
    if wrong and len(table):
        raise error(f"{where} is malformed: column {', '.join(wrong)} must hold numbers{hint}")
    if infinite := [str(each) for each in table.select_dtypes("number") if np.isinf(table[each]).any()]:
        raise error(f"{where} is malformed: column {infinite[0][:60]} holds infinite numbers{hint}")
    return table.fillna({each: "" for each in words if each in table.columns})
