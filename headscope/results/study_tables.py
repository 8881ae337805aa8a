"""Reading the record and the tables of a run's folder, and the errors about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.config.declarations import measured_columns
from headscope.errors import HeadscopeError, flag, reason_of
from headscope.files.reading import no_path, read_object
from headscope.files.tables import is_cut_off, read_csv
from headscope.registry import unknown

HEAD_COLUMNS = ["site", "layer", "head"]
"""Columns that name a head."""
TEXTS = (
    *("site", "relation", "direction", "label", "ranking", "order", "metric", "measure", "missing"),
    *("token", "lacks", "functions", "functions_unsupported", "syntactic_relation"),
    *("role", "which", "text"),
    *("kind", "name", "query", "key", "query_text", "key_text", "description"),
)
"""Columns that hold text, in which an empty cell is "" and not a missing number."""


class RunError(HeadscopeError):
    """A directory is not a run of `headscope analyze`, or one of its files is broken."""


class MissingTable(RunError):
    """The run lacks a table, because the analysis that writes it was not part of the run."""


def open_record(folder: str | PathLike[str], name: str, *kinds: str, wrote: str) -> tuple[Path, dict[str, Any]]:
    """The folder of a run and its record, the file `name`; RunError unless its kind is one that a command `wrote`."""
    path = Path(folder)
    if not (path / name).is_file():
        problem = f"{path} has no {name}" if path.is_dir() else no_path(path, "directory")
        raise RunError(f"{problem}; name what `headscope {wrote}` wrote")
    record = read_object(path / name, error=RunError)
    if not str(kind := record.get("kind", kinds[0])).startswith(kinds):
        raise RunError(f"{path} is a run of another kind ({str(kind)[:40]}); name what `headscope {wrote}` wrote")
    return path, record


def read_table(path: Path) -> pd.DataFrame:
    """A table of a study; RunError where it is cut off or malformed."""
    name = f"run {path.parent.name}: {path.name}"
    if path.is_file() and is_cut_off(path):
        raise RunError(f"{name} is cut off; analyse again")
    columns = (*HEAD_COLUMNS, "functions") if path.stem == "heads" else ()
    return read_csv(path, columns=columns, texts=TEXTS, error=RunError, name=name, advice="analyse again")


@contextmanager
def files_of(runs: Sequence[Path]) -> Iterator[None]:
    """Within the block, errors about the content of runs' files become a RunError in one line.

    Readers check the names of columns only: headscope wrote these files, so other errors mean that one was changed.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
        names = ", ".join(str(run) for run in runs)
        problem = f"{type(error).__name__}: {reason_of(error, max_length=120)}"
        raise RunError(f"{names} cannot be drawn ({problem}); a file was changed or cut: make the run again") from error


OPTIONS_FOR_NEEDS = {
    "parse": " --parse stanza",
    "exclude_sinks": " --exclude-sinks",
    "template": " --target FILE --template TEXT",
    "word_times": " --set alignment.word-times=FILE.csv",
}


def unknown_column(column: str, columns: list[str]) -> str:
    """The message for an absent column of heads.csv: the command that adds it, else the nearest column."""
    if column not in measured_columns():
        return unknown("measure", column, columns)
    analysis, measure = measured_columns()[column]
    needs = {*analysis.needs, measure.needs}
    more = "".join(option for need, option in OPTIONS_FOR_NEEDS.items() if need in needs)
    command = f"headscope analyze CKPT {flag.source} FILE {flag.out} DIR {flag.also} {analysis.name}{more}"
    return f"{column!r} was not measured, `{command}` adds it; available: {', '.join(columns)}"
