"""A training: what `headscope train` wrote, with the history of all that it measured."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.files.reading import read_object
from headscope.files.tables import read_csv
from headscope.heads import SITES
from headscope.results.answer import Answer, AnswerTable, number_text
from headscope.results.result import StoredResult
from headscope.results.study_tables import RunError

AXES = {"update": "update", "tokens": "target tokens", "seconds": "seconds"}
"""Columns that a history can be drawn against, in words."""
SHARES = "expert_share"
"""Columns of how much experts count, which have a figure of their own."""


class Training(StoredResult):
    """The history of a training; `record` is what run.json holds, `metrics` what metrics.csv does."""

    def __init__(self, record: dict[str, Any], metrics: pd.DataFrame, folder: Path) -> None:
        self.record, self.tables, self.folder = record, {"metrics": metrics}, folder

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Training:
        """The training in a folder that `headscope train --out` wrote; RunError for another folder."""
        path = Path(folder)
        for name in ("run.json", "metrics.csv"):
            if not (path / name).is_file():
                raise RunError(f"{path} is no training run: it has no {name}; name what `headscope train --out` wrote")
        failure = f"training run {path.name} cannot be read:"
        record = read_object(path / "run.json", error=RunError, name=f"{failure} run.json")
        if record.get("kind") != "training":
            raise RunError(f"{path} is no training run: its run.json or metrics.csv is of something else")
        metrics = read_csv(path / "metrics.csv", columns=AXES, error=RunError, name=f"{failure} metrics.csv")
        if not len(metrics):
            raise RunError(f"training run {path.name}: metrics.csv has no line yet")
        return cls(record, metrics, path)

    @property
    def metrics(self) -> pd.DataFrame:
        """A row whenever something was noted."""
        return self.tables["metrics"]

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.folder.resolve().name

    def answers(self) -> list[Answer]:
        """The best of the training."""
        return training_answers([self], [self.name])

    def line(self, column: str, axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Where a column has values, and these."""
        table = self.metrics[[axis, column]].dropna()
        return table[axis].to_numpy(float), table[column].to_numpy(float)

    def has(self, column: str) -> bool:
        """Whether the run noted it."""
        return column in self.metrics.columns and bool(self.metrics[column].notna().any())

    def sites(self, quantity: str) -> list[str]:
        """The sites for which the run noted a quantity, in the order of sites; "" where it did so for the whole."""
        names = [name for name in self.metrics.columns if name.partition(".")[0] == quantity and self.has(name)]
        order = ["", *map(str, SITES)]
        sites = [name.partition(".")[2] for name in names]
        return sorted(sites, key=lambda site: order.index(site) if site in order else len(order))

    def best(self, column: str, *, highest: bool) -> str:
        """The best of what was measured on the validation text, and the update at which that was."""
        if not self.has(column):
            return ""
        x, y = self.line(column, "update")
        place = int(y.argmax() if highest else y.argmin())
        return f"{number_text(y[place])} at update {x[place]:,.0f}"


def training_answers(runs: Sequence[Training], names: Sequence[str]) -> list[Answer]:
    """A row for each training: how long it was, and its best."""
    columns = ("run", "variant", "updates", "seconds", "best validation loss", "best BLEU")
    rows = tuple(
        (
            name,
            str(run.record.get("variant", "")),
            f"{run.metrics['update'].max():,.0f}",
            number_text(run.metrics["seconds"].max()),
            run.best("valid_nll", highest=False),
            run.best("bleu", highest=True),
        )
        for name, run in zip(names, runs, strict=True)
    )
    return [Answer("", "", AnswerTable(columns, rows))]


def open_training(path: Path) -> Training:
    """`Training.open`, for figures, which name what reads their runs."""
    return Training.open(path)
