"""A training run: what `headscope train` wrote, with the history of its measurements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from headscope.config.option import plain_value
from headscope.files.tables import read_csv
from headscope.heads import SITES
from headscope.results.answer import Answer, Result
from headscope.results.study_tables import RunError, open_record
from headscope.signature import count_of

AXES = {"update": "update", "tokens": "target tokens", "seconds": "seconds"}
"""Columns of metrics.csv for the horizontal axis of figures, and their labels."""
SHARES = "expert_share"
"""Prefix of the columns with the mean weights of experts, which have a figure of their own."""


@dataclass(frozen=True, repr=False)
class Training(Result):
    """The history of a training run, and its end: the reason, the epoch, the number of updates.

    `record` is what run.json holds, `metrics` what metrics.csv holds. `best` is the best validation value, -log p or
    BLEU, None without validation text; `nll` and `bleu` are those of the last validation. `remarks` name parts of the
    variant that never took effect (none if it was interrupted). `begun_at` is the update at which `resume` began; it
    equals `update` if the run was complete. An unfinished run has no `reason`.
    """

    record: dict[str, Any] = field(compare=False)
    metrics: pd.DataFrame = field(compare=False)
    folder: Path
    reason: str = ""
    epoch: int = 0
    update: int = 0
    best: float | None = None
    best_update: int = 0
    nll: float | None = None
    bleu: float | None = None
    seconds: float = 0.0
    parameters: int = 0
    signature: str = ""
    remarks: tuple[str, ...] = ()
    begun_at: int = field(default=0, compare=False)

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Training:
        """The training in a folder that `headscope train --out` wrote; RunError for another folder."""
        path, record = open_record(folder, "run.json", "training", wrote="train")
        metrics = read_csv(path / "metrics.csv", columns=AXES, error=RunError)
        if not len(metrics):
            raise RunError(f"training run {path.name}: metrics.csv has no line yet")
        so_far = {"update": int(metrics["update"].max()), "seconds": float(metrics["seconds"].max())}
        values = {"signature": str(record.get("signature", "")), **so_far, **record.get("result", {}), "folder": path}
        return cls(record, metrics, **{**values, "remarks": tuple(values.get("remarks", ()))})

    @property
    def tables(self) -> Mapping[str, pd.DataFrame]:  # type: ignore[override]
        """`metrics`."""
        return {"metrics": self.metrics}

    @property
    def outcome(self) -> dict[str, Any]:
        """What run.json holds as `result`: the end of the run."""
        names = [entry.name for entry in fields(self) if entry.name not in ("record", "metrics")]
        return {name: plain_value(getattr(self, name)) for name in names}

    @property
    def name(self) -> str:
        """The directory's own name."""
        return self.folder.resolve().name

    def answers(self) -> list[Answer]:
        """The quality of the model, its best epoch, and its checkpoints."""
        scores = [f"validation loss {self.nll:.4f} nats"] if self.nll is not None else []
        if self.nll is None and self.has("nll"):
            scores = [f"training loss {self.line('nll', 'update')[1][-1]:.4f} nats"]
        scores += [f"BLEU {self.bleu:.2f}"] if self.bleu is not None else []
        effort = f"{count_of(self.update, 'update')} in {self.seconds:.0f} s"
        effort += f", {self.parameters:,} parameters" * bool(self.parameters)
        state = {"interrupted": " (interrupted)", "": " (unfinished)"}.get(self.reason, "")
        answers = [Answer("", f"{self.folder.name}{state}: {', '.join([*scores, effort])}", caution=bool(state))]
        if self.best is not None:
            unit = "BLEU" if self.record.get("config", {}).get("best_by") == "bleu" else "nats"
            answers.append(Answer("Best", f"{self.best:.4f} {unit} at update {self.best_update}"))
        if checkpoints := [name for name in ("last", "best", "averaged") if (self.folder / name).is_dir()]:
            answers.append(Answer("Checkpoints", f"{', '.join(checkpoints)} in {self.folder}"))
        return [*answers, *(Answer("Note", remark, caution=True) for remark in self.remarks)]

    def line(self, column: str, axis: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The values of an axis and of a column, in the rows in which both have one."""
        table = self.metrics[[axis, column]].dropna()
        return table[axis].to_numpy(float), table[column].to_numpy(float)

    def has(self, column: str) -> bool:
        """Whether metrics.csv has a value in a column."""
        return column in self.metrics.columns and bool(self.metrics[column].notna().any())

    def sites(self, quantity: str) -> list[str]:
        """The sites in the columns of a quantity (`swaps.cross`), in order; "" for a column without one (`swaps`)."""
        names = [name for name in self.metrics.columns if name.partition(".")[0] == quantity and self.has(name)]
        order = ["", *map(str, SITES)]
        sites = [name.partition(".")[2] for name in names]
        return sorted(sites, key=lambda site: order.index(site) if site in order else len(order))
