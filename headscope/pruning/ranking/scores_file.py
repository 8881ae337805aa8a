"""Scores of heads from a CSV file: a run's `heads.csv`, a ranking that headscope wrote, or one of the user's own."""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from headscope.engine.declarations import Measure, measured_columns
from headscope.engine.faithfulness.orders import Scores
from headscope.errors import DataError
from headscope.files.tables import read_csv
from headscope.heads import HeadId, Layout, Site, describe_heads
from headscope.pruning.ranking.criterion import MeasuredColumn, column_named, columns

LOCATION = ("site", "layer", "head")


def read_heads(path: Path, layout: Layout) -> pd.DataFrame:
    """A table with a row a head, checked against a model.

    DataError, with the line, for a file that is no such table, for a head that the model lacks, and for one twice.
    """
    file = path / "heads.csv" if path.is_dir() else path
    table = read_csv(file)
    if missing := [name for name in LOCATION if name not in table]:
        raise DataError(f"{file} lacks the column {missing[0]!r}; it needs site,layer,head and a column of scores")
    seen: set[HeadId] = set()
    for line, (site, layer, head) in enumerate(table[list(LOCATION)].itertuples(index=False), start=2):
        head_id = _head(site, layer, head)
        if head_id is None or not 0 <= head_id.head < layout.get((head_id.site, head_id.layer), 0):
            name = f"{site}.{layer}.{head}"[:60]
            raise DataError(f"{file}:{line}: this model has no head {name}; it has {describe_heads(layout)}")
        if head_id in seen:
            raise DataError(f"{file}:{line}: head {head_id} is there a second time")
        seen.add(head_id)
    return table


def read_scores(path: Path, layout: Layout, *, column: str | None = None) -> tuple[MeasuredColumn, Scores]:
    """A column of a table, and the numbers in it: `column`, else "score", else the only one there is.

    A column of an analysis has the direction that the analysis declares; any other one holds scores: the highest stay.
    """
    table = read_heads(path, layout)
    there = columns(table)
    if column is None:
        column = "score" if "score" in there else there[0] if len(there) == 1 else None
    if column is None or column not in there:
        fault = "several columns" if column is None else f"no column {column!r} of numbers"
        raise DataError(f"{path} has {fault} ({', '.join(there) or 'none'}); choose one with --column")
    own = MeasuredColumn(Measure(column, keep="highest", why="the higher a score, the longer its head stays"))
    measured = column_named(column) if column in measured_columns() else own
    return measured, measured.of(table)


def _head(site: object, layer: object, head: object) -> HeadId | None:
    try:
        return HeadId(Site(str(site)), int(str(layer)), int(str(head)))
    except ValueError:
        return None
