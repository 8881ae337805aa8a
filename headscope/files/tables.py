"""CSV tables, read with checks of their columns; arrays, pickles, and the attention weights of a few short sentences.

`examples.npz` has the weights of every head as bytes (0 … 255 for 0 … 1): `{number}/{site}` is an array [n t s], heads
in the order of layers. `index` is JSON: of every sentence its line in the corpus, its texts and its subwords.
"""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.errors import DataError, HeadscopeError, reason_of, restate
from headscope.files.reading import no_path
from headscope.files.writing import write_atomically

SIMILARITY, EXAMPLES = "similarity.npz", "examples.npz"

MISSING = ["", "nan", "NaN", "NA", "N/A"]
"""Cells without a number; words that pandas also takes for such ("None", "null") may be tokens."""

FORMULA = re.compile(r"'*[=+\-@\t\r]")
"""Matches the beginning of texts that a spreadsheet would take for a formula, also after apostrophes."""

NUMBER = re.compile(r"[+-]?\d+(\.\d+)?([eE][+-]?\d+)?")
SHIELD = re.compile(r"^'(?='*[=+\-@\t\r])")


def write_csv(path: Path, table: pd.DataFrame, *, number: str | None = None) -> Path:
    """Write a table without its index; `number` is a format for numbers, such as "%.7g".

    A text that a spreadsheet would take for a formula gets an apostrophe in front, which `read_csv` removes; a text
    that is a number gets none.
    """

    def shield(cell: object) -> object:
        is_formula = isinstance(cell, str) and FORMULA.match(cell) and not NUMBER.fullmatch(cell)
        return f"'{cell}" if is_formula else cell

    table = table.assign(**{str(name): table[name].map(shield) for name in table.select_dtypes(exclude="number")})
    return write_atomically(path, lambda temporary: table.to_csv(temporary, index=False, float_format=number))


def write_arrays(path: Path, arrays: Mapping[str, Any]) -> Path:
    """Write numpy arrays as a compressed .npz."""
    return write_atomically(path, lambda temporary: np.savez_compressed(temporary, **arrays))


def write_pickle(path: Path, value: Any) -> Path:
    """Write a pickle of plain containers and numpy arrays, protocol 3 as the MHR fork does; numpy 1 opens it too."""
    new, old = (f"cnumpy.{core}.multiarray\n_reconstruct\n".encode() for core in ("_core", "core"))
    content = pickle.dumps(value, protocol=3).replace(new, old)
    return write_atomically(path, content)


def is_cut_off(path: Path) -> bool:
    """Whether the last line of a file has no end, as all lines have that headscope writes."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 1))
        return file.read() not in (b"", b"\n")


def read_csv(
    path: Path,
    *,
    columns: Iterable[str] = (),
    texts: Iterable[str] = (),
    error: type[HeadscopeError] = DataError,
    name: str = "",
    advice: str = "",
) -> pd.DataFrame:
    """A table that has `columns`: columns among `texts` hold text (also "nan"), the other `columns` hold numbers.

    Columns that are not named may hold either. Raises `error`, whose message calls the file `name` and ends with
    `advice`, for a missing or malformed file, a missing column, and a column of numbers with other content.
    """
    file_name, hint = name or str(path), f"; {advice}" if advice else ""
    if not path.is_file():
        raise error(f"{file_name} is no file{hint}" if path.exists() else no_path(file_name))
    words = dict.fromkeys(texts, str)
    reading: dict[str, Any] = {"encoding": "utf-8", "keep_default_na": False}
    try:
        header = pd.read_csv(path, nrows=0, **reading)
        missing = {column: MISSING for column in header if column not in words}
        table: pd.DataFrame = pd.read_csv(path, dtype=words, low_memory=False, na_values=missing, **reading)
    except OSError as exception:
        raise error(f"{file_name} cannot be read: {exception.strerror or exception}") from None
    except (ValueError, OverflowError, MemoryError) as exception:  # pandas' own errors are ValueErrors
        raise error(f"{file_name} is malformed ({reason_of(exception)}){hint}") from None
    if absent := [column for column in columns if column not in table]:
        raise error(f"{file_name} is malformed: it has no column {', '.join(absent)}{hint}")
    numbers = [column for column in columns if column not in words]
    wrong = [column for column in numbers if not pd.api.types.is_numeric_dtype(table[column])]
    if wrong and len(table):
        raise error(f"{file_name} is malformed: column {', '.join(wrong)} must hold numbers{hint}")
    for column in table.select_dtypes(exclude="number"):
        table[column] = table[column].map(lambda cell: SHIELD.sub("", cell) if isinstance(cell, str) else cell)
    return table.fillna({column: "" for column in words if column in table})


Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Example:
    """One sentence: its texts and subwords by side ("source", "target"), and weights [n t s] of the heads by site."""

    number: int
    texts: Mapping[str, str]
    subwords: Mapping[str, Sequence[str]]
    weights: Mapping[str, Bytes] = field(default_factory=dict)


def as_arrays(examples: Sequence[Example]) -> dict[str, Bytes]:
    """The content of examples.npz."""
    index = [{"number": e.number, "texts": dict(e.texts), "subwords": dict(e.subwords)} for e in examples]
    arrays = {
        f"{position}/{site}": weights for position, e in enumerate(examples) for site, weights in e.weights.items()
    }
    return {"index": np.frombuffer(json.dumps(index).encode(), dtype=np.uint8), **arrays}


def read_arrays(path: Path, error: type[HeadscopeError]) -> Mapping[str, Any]:
    """The arrays of an .npz that headscope wrote; empty if there is no such file, `error` if it is damaged."""
    if not path.is_file():
        return {}
    with (
        restate(error, f"{path} cannot be read ({{why}}); analyse again", Exception),
        path.open("rb") as file,
        np.load(file, allow_pickle=False) as arrays,
    ):
        return dict(arrays)


def read_examples(path: Path, error: type[HeadscopeError]) -> Sequence[Example]:
    """The sentences of `examples.npz`; empty if there is no such file, `error` if it is damaged."""
    arrays = read_arrays(path, error)
    if not arrays:
        return ()
    kinds = (AttributeError, LookupError, TypeError, ValueError)
    with restate(error, f"{path} is not a file of examples ({{why}}); analyse again", *kinds):
        index = json.loads(arrays["index"].tobytes().decode("utf-8"))
        weights: list[dict[str, Bytes]] = [{} for _ in index]
        for name in (name for name in arrays if name != "index"):
            position, _, site = name.partition("/")
            weights[int(position)][site] = arrays[name]
        examples = zip(index, weights, strict=True)
        return [Example(int(one["number"]), one["texts"], one["subwords"], of_sites) for one, of_sites in examples]
