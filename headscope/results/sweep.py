"""A sweep, or runs of `prune rank`, `l0` and `subset` as one: cells, the heads that each keeps, gates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from headscope.files.tables import read_csv
from headscope.heads import SITES, HeadId
from headscope.results.answer import (
    MAX_ROWS,
    Answer,
    StoredResult,
    filled_table,
    number_text,
    remark_answers,
    signed_text,
)
from headscope.results.ranking import Ranking
from headscope.results.study import Study, model_name
from headscope.results.study_tables import HEAD_COLUMNS, RunError, open_record

COLUMNS = (
    *("method", "control", "size", "seed", "kept", "of", "metric", "value", "low", "high", "difference", "loss"),
    "cell",
)
GATES = ("update", *HEAD_COLUMNS, "gate", "open")
UNPRUNED = "unpruned"
RELABELLED = "relabelled"
"""Column of survivors.csv with --relabel: the functions that heads have in the pruned model."""
KEY = ["method", "control", "size"]
CAN_GO = {"non-inferior": "can go", "worse": "worse", "not established": "not shown", "not tested": ""}
MAX_NAMES = 3  # folders that the name of several runs together lists
TEXTS = (*KEY, "metric", "cell", "site", "functions", "model", "verdict", RELABELLED)


@dataclass(eq=False)
class Sweep(StoredResult):
    """Pruned models (cells) by method, size and seed: their sizes, quality, remaining heads and gates.

    `cells` has method, control, size, seed, kept, of, kept_SITE and cell, and of a sweep the columns of quality
    (`has_quality`); `unpruned` are its rows of the model with all heads. `verdicts` says which methods and sizes are as
    good as that model. `survivors` has a row for every head that a cell keeps; its column `functions`, where labels are
    known, are those of the unpruned model. `gates` are files of learnt gates by cell. `runs` are the rankings of which
    `open_pruned` made this; a sweep has none.
    """

    name: str
    record: dict[str, Any]
    cells: pd.DataFrame
    survivors: pd.DataFrame
    gates: Mapping[str, Path] = field(default_factory=dict)
    folder: Path = Path()
    runs: Sequence[Ranking] = ()

    def __post_init__(self) -> None:
        self.tables = {"sweep": self.cells, "survivors": self.survivors}
        self.verdicts = pd.DataFrame(self.record.get("verdicts", []))
        self.has_quality = "value" in self.cells
        self.sites = [site.value for site in SITES if f"kept_{site.value}" in self.cells]
        self.model = model_name(self.record.get("source", {}).get("path"))
        self.unpruned = self.cells[self.cells["method"] == UNPRUNED]

    @classmethod
    def open(cls, folder: str | PathLike[str]) -> Sweep:
        """The sweep in a folder that `headscope prune sweep` wrote."""
        path, record = open_record(folder, "sweep.json", "sweep", wrote="prune sweep")
        cells = read_csv(path / "sweep.csv", columns=COLUMNS, texts=TEXTS, error=RunError)
        if not len(cells):
            raise RunError(f"sweep {path.name}: sweep.csv has no row yet")
        survivors = read_csv(path / "survivors.csv", columns=(*HEAD_COLUMNS, "cell"), texts=TEXTS, error=RunError)
        gates = {file.parent.name: file for file in sorted(path.glob("runs/*/gates.csv"))}
        return cls(path.resolve().name, record, cells, survivors, gates, path)

    def answers(self) -> list[Answer]:
        """The conclusions and sizes of a sweep; of single runs their own answers."""
        if not self.has_quality:
            return [answer for run in self.runs for answer in run.answers()]
        record = {"conclusions": [], "remarks": [], "directions": {}} | self.record
        answers = [Answer("", f"{self.name}: {_headline(record)}")]
        answers += [Answer("", conclusion, detail=True) for conclusion in record["conclusions"]]
        rows: list[Any] = self._sizes().to_dict("records")
        columns = ("", "λ", "heads", str(self.cells["metric"].iloc[0]), "± sd", "change", "worse ≤", "verdict")
        first_rows = sorted(rows, key=lambda row: row["method"] != UNPRUNED)[:MAX_ROWS]
        table = filled_table(columns, [_sweep_row(row) for row in first_rows])
        hidden = len(rows) - len(first_rows)
        answers.append(Answer("Sizes", f"{hidden} more in sweep.csv" if hidden > 0 else "", table))
        answers += [Answer(method, direction, detail=True) for method, direction in record["directions"].items()]
        return [*answers, *remark_answers(record["remarks"], "sweep.json")]

    def _sizes(self) -> pd.DataFrame:
        """A row for every method and size with its verdict; means and deviations over seeds."""
        summary = self.cells.groupby(KEY, sort=False, dropna=False).agg(
            seeds=("value", "size"),
            kept=("kept", "mean"),
            value=("value", "mean"),
            sd=("value", "std"),
            difference=("difference", "mean"),
        )
        verdicts = self.verdicts.reindex(columns=[*KEY, "verdict", "worse_limit"])
        return summary.reset_index().merge(verdicts, on=KEY, how="left").fillna(np.nan)

    def to_json(self) -> dict[str, Any]:
        """The record with a row for each cell, and the answers."""
        content = super().to_json()
        content["record"]["cells"] = json.loads(self.cells.to_json(orient="records"))  # NaN becomes null
        return content

    def trajectory(self, cell: str) -> pd.DataFrame:
        """The gates of a cell at the updates of their training."""
        return read_csv(self.gates[cell], columns=GATES, texts=TEXTS, error=RunError)

    def with_labels(self, labels: Study) -> Sweep:
        """A copy whose `functions` are the labels of a run of `analyze`; RunError for a run on another model."""
        swept = self.record.get("digests", {}).get("checkpoint") or self.record.get("source", {}).get("digest")
        labelled = (labels.record.get("checkpoint") or {}).get("digest")
        if swept and labelled and swept != labelled:
            raise RunError(f"run {labels.name} labels heads of another model; name a run on {self.model}")
        unlabelled = self.survivors.drop(columns=["functions", RELABELLED], errors="ignore")
        survivors = unlabelled.merge(labels.heads[[*HEAD_COLUMNS, "functions"]], on=HEAD_COLUMNS, how="left").fillna(
            {"functions": ""}
        )
        return replace(self, survivors=survivors)


def open_pruned(paths: Sequence[Path]) -> list[Sweep]:
    """Read sweeps, and runs of `l0`, `subset` and `rank`, which become one `Sweep` for each model."""
    sweeps = [Sweep.open(path) for path in paths if (path / "sweep.json").is_file()]
    groups: dict[str, list[Ranking]] = {}
    for path in {path.resolve(): path for path in paths}.values():  # a folder that is named twice counts once
        if not (path / "sweep.json").is_file():
            run = Ranking.open(path)
            groups.setdefault(str((run.record.get("source") or {}).get("digest")), []).append(run)
    return [*sweeps, *map(_combine_rankings, groups.values())]


def _combine_rankings(runs: Sequence[Ranking]) -> Sweep:
    """Runs of one model as the cells of a sweep, named by their folders; the unpruned model is the first cell."""
    folders = [run.folder.resolve() for run in runs]
    names = [UNPRUNED, *(folder.name for folder in folders)]
    rows, heads, gates = list[dict[str, Any]](), list[dict[str, Any]](), dict[str, Path]()
    for run, folder in zip(runs, folders, strict=True):
        cell = folder.name if names.count(folder.name) == 1 else str(folder)
        record, per_site = run.record, run.record["kept_per_site"]
        if not rows:
            all_heads = {f"kept_{site}": int(counts["of"]) for site, counts in per_site.items()}
            rows.append(
                _row(record, UNPRUNED) | all_heads | {"method": UNPRUNED, "size": "", "kept": int(record["heads"])}
            )
            heads += [_head_columns(head) | rows[0] for head in [*run.kept, *run.removed]]
        rows.append(_row(record, cell) | {f"kept_{site}": int(counts["kept"]) for site, counts in per_site.items()})
        heads += [_head_columns(head) | rows[-1] for head in run.kept]
        if "gates" in run.tables:
            gates[cell] = run.folder / "gates.csv"
    survivors = pd.DataFrame(heads)[[*HEAD_COLUMNS, "method", "size", "cell"]]
    signatures = "\n".join(dict.fromkeys(run.signature for run in runs))
    name = ", ".join(names[1 : MAX_NAMES + 1]) + (", …" if len(runs) > MAX_NAMES else "")
    return Sweep(name, {**runs[0].record, "signature": signatures}, pd.DataFrame(rows), survivors, gates, runs=runs)


def _row(record: Mapping[str, Any], cell: str) -> dict[str, Any]:
    """The row of `cells` for one ranking."""
    learning = record.get("learning", {})
    has_price = "lambda_paper" in learning and not learning.get("lambda_searched", True)
    return {
        "method": record["method"] if record["method"] != "rank" else record["ranking"]["by"],
        "control": "",
        "size": f"lambda {learning['lambda_paper']:g}" if has_price else f"keep {record['kept']}",
        "seed": record["options"]["seed"],
        "kept": int(record["kept"]),
        "of": int(record["heads"]),
        "cell": cell,
    }


def _head_columns(head: HeadId) -> dict[str, Any]:
    return {"site": head.site.value, "layer": head.layer, "head": head.head}


def _headline(record: Mapping[str, Any]) -> str:
    """The conclusion about the method that can lose most heads; where none can, the smallest loss the text would show.

    `conclusions` has a line for every method with a verdict, in their order, then lines about the text.
    """
    conclusions = [line.partition(";")[0] for line in record["conclusions"]]
    if not conclusions:
        return "no verdict" if record["remarks"] else "nothing to compare with"
    verdicts = [row for row in record.get("verdicts", []) if row["verdict"]]
    methods = list(dict.fromkeys((row["method"], row["control"]) for row in verdicts))
    if good := [row for row in verdicts if row["verdict"] == "non-inferior"]:
        best = min(good, key=lambda row: row["kept"])
        return conclusions[methods.index((best["method"], best["control"]))]
    return "; ".join(["no size is shown to be as good as the unpruned model", *conclusions[len(methods) :]])


def _sweep_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    is_unpruned = row["method"] == UNPRUNED
    return (
        f"{row['method']} {row['control']}".strip(),
        row["size"].removeprefix("lambda ") if row["size"].startswith("lambda") else "",
        f"{row['kept']:.4g}",
        f"{row['value']:.4g}",
        "" if row["seeds"] == 1 else f"{row['sd']:.2g} of {row['seeds']}",
        "" if is_unpruned else signed_text(row["difference"], ".3g"),
        "" if row["worse_limit"] != row["worse_limit"] else number_text(row["worse_limit"]),
        CAN_GO.get(row["verdict"], ""),
    )
