"""Read scores of heads from a CSV file: the `heads.csv` of a run, a ranking that headscope wrote, or another one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pandas as pd

from headscope.engine.faithfulness.orders import Scores, heads_of_rows
from headscope.errors import ConfigError, DataError, flag
from headscope.files.reading import read_record
from headscope.files.tables import read_csv
from headscope.formats.base import Checkpoint
from headscope.heads import HeadId, Layout, Site, describe_heads
from headscope.results.study_tables import unknown_column

LOCATION = ("site", "layer", "head")


def read_heads(path: Path, layout: Layout) -> pd.DataFrame:
    """A table with a row for each head; DataError for heads that a model does not have."""
    file = path / "heads.csv" if path.is_dir() else path
    if path.is_dir() and not file.exists():
        raise DataError(f"{path} has no heads.csv, so it is not a run of `headscope analyze`; name one")
    table = read_csv(file)
    if missing := [name for name in LOCATION if name not in table]:
        raise DataError(f"{file} lacks the column {missing[0]!r}; it needs site,layer,head and a column of scores")
    heads_read: set[HeadId] = set()
    for line, (site, layer, head) in enumerate(table[list(LOCATION)].itertuples(index=False), start=2):
        head_id = None
        with suppress(ValueError):
            head_id = HeadId(Site(str(site)), int(str(layer)), int(str(head)))
        if head_id is None or not 0 <= head_id.head < layout.get((head_id.site, head_id.layer), 0):
            name = f"{site}.{layer}.{head}"[:60]
            raise DataError(f"{file}:{line}: this model has no head {name}; it has {describe_heads(layout)}")
        if head_id in heads_read:
            raise DataError(f"{file}:{line}: head {head_id} is there a second time")
        heads_read.add(head_id)
    return table


def other_weights(run: Path | None, checkpoint: Checkpoint) -> list[str]:
    """A remark if a run of `headscope analyze` measured other weights than a checkpoint's."""
    measured = {} if run is None else read_record(run / "run.json").get("checkpoint")
    digest = measured.get("digest") if isinstance(measured, dict) else None
    if digest in (None, checkpoint.digest):
        return []
    return [f"{run} measured other weights than those of {checkpoint.path}; heads are matched by name"]


def read_scores(path: Path, layout: Layout, *, column: str | None = None) -> tuple[str, Scores]:
    """The name of a column of a table, and its scores: `column`, else "score", else the only column."""
    table = read_heads(path, layout)
    column_names = columns(table)
    if column is None:
        column = "score" if "score" in column_names else column_names[0] if len(column_names) == 1 else None
    if column is None or column not in column_names:
        fault = "several columns" if column is None else f"no column {column!r} of numbers"
        raise DataError(f"{path} has {fault} ({', '.join(column_names) or 'none'}); choose one with {flag.column}")
    return column, scores_in(table, column)


def columns(heads: pd.DataFrame) -> list[str]:
    """The columns that heads can be ranked by."""
    numeric = [name for name in heads.columns if pd.api.types.is_numeric_dtype(heads[name])]
    return [name for name in numeric if name not in ("layer", "head") and not name.endswith(("_low", "_high"))]


def scores_in(heads: pd.DataFrame, column: str) -> Scores:
    """The scores in a column of a table of heads; ConfigError where it lacks the column."""
    if column not in heads or not pd.api.types.is_numeric_dtype(heads[column]):
        raise ConfigError(f"heads.csv: {unknown_column(column, columns(heads))}")
    return dict(zip(heads_of_rows(heads), heads[column].to_numpy(dtype=float).tolist(), strict=True))
