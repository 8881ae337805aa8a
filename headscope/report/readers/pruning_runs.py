"""What `headscope prune sweep`, `l0`, `subset` and `rank` wrote, read back for figures: one table of cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.files.reading import read_object, read_record, read_text
from headscope.files.tables import read_csv
from headscope.heads import SITES, HeadId
from headscope.results.study import Study, model_name
from headscope.results.study_tables import RunError

SWEEP = (
    *("method", "control", "size", "seed", "kept", "of", "metric", "value", "low", "high", "difference", "loss"),
    "cell",
)
HEAD_COLUMNS = ["site", "layer", "head"]
GATES = ("update", *HEAD_COLUMNS, "gate", "open")
UNPRUNED = "unpruned"
RELABELLED = "relabelled"
"""Column of the survivors of a sweep with --relabel: the functions that heads have in the pruned model."""
MOST_NOTES = 24
NAMED = 3  # runs whose folders make the name of them all
TEXTS = ("method", "control", "size", "metric", "cell", "site", "functions", RELABELLED)


@dataclass(frozen=True)
class PruningRun:
    """Cells with their sizes, the heads that each keeps, and trajectories of gates by name of the cell.

    `cells` has method, control, size, seed, kept, of, kept_SITE and cell; of a sweep also the columns of quality
    (`measured`). `survivors` has a row for every head that stays; `functions` where labels are known. These are of the
    heads of `labelled`, empty for the unpruned model; of a pruned one `survivors` has the cells whose heads it has.
    """

    name: str
    meta: Mapping[str, Any]
    cells: pd.DataFrame
    survivors: pd.DataFrame
    gates: Mapping[str, Path] = field(default_factory=dict)
    labelled: str = ""

    @property
    def measured(self) -> bool:
        """Whether there are numbers of quality."""
        return "value" in self.cells

    @property
    def notes(self) -> list[str]:
        """By method how many heads can go, and within which margin, as the sweep concluded."""
        lines = self.meta.get("conclusions")
        verdicts = [line.split(";")[0] for line in lines if isinstance(line, str)] if isinstance(lines, list) else []
        return verdicts[:MOST_NOTES]

    @property
    def sites(self) -> list[str]:
        """The gated sites."""
        return [site.value for site in SITES if f"kept_{site.value}" in self.cells]

    @property
    def model(self) -> str:
        """The last part of the checkpoint's path, with the one before it where it tells nothing."""
        source = self.meta.get("source")
        return model_name(Path(str(source.get("path", "model") if isinstance(source, dict) else "model")))

    def trajectory(self, cell: str) -> pd.DataFrame:
        """The gates of a cell while they learnt."""
        return _table(self.gates[cell], GATES)


def load_pruned(paths: Sequence[Path]) -> list[PruningRun]:
    """Read sweeps; runs of `l0`, `subset` and `rank` on one model are put together as if they were one.

    RunError for a directory that is neither.
    """
    sweeps, selections = [], []
    for path in paths:
        if (path / "sweep.json").is_file():
            sweeps.append(_sweep(path))
        elif (path / "pruning.json").is_file():
            selections.append(path)
        else:
            raise RunError(
                f"{path} has neither sweep.json nor pruning.json; name what `headscope prune sweep`, `l0`, `subset` "
                "or `rank` wrote"
            )
    groups: dict[str, list[Path]] = {}
    for selection in {path.resolve(): path for path in selections}.values():  # each once
        source = _json(selection / "pruning.json").get("source")
        digest = source.get("digest") if isinstance(source, dict) else None
        groups.setdefault(str(digest), []).append(selection)
    return [*sweeps, *map(_selections, groups.values())]


def with_labels(runs: Sequence[PruningRun], functions: Path) -> list[PruningRun]:
    """The same, their heads labelled by a run of `analyze`."""
    labels = Study.open(functions)
    return [_labelled(run, labels) for run in runs]


def _labelled(run: PruningRun, labels: Study) -> PruningRun:
    """The labels of a run of `analyze` on heads that stay, under the numbers that they had before any went."""
    heads = labels.heads[[*HEAD_COLUMNS, "functions"]].fillna({"functions": ""})
    bare = run.survivors.drop(columns=["functions", RELABELLED], errors="ignore")
    source, checkpoint = (dict(part) if isinstance(part, dict) else {} for part in _checkpoints(run, labels))
    if "" in (own := {str(part.get("digest") or "") for part in (source, checkpoint)}) or len(own) == 1:
        joined = bare.merge(heads, on=HEAD_COLUMNS, how="left").fillna({"functions": ""})
        return replace(run, survivors=joined, labelled="")
    path = Path(str(checkpoint.get("path")))
    stay = _numbered(heads, path)
    stay = stay[stay["site"].isin(run.sites)]
    survivors = bare.merge(stay, on=HEAD_COLUMNS, how="left")
    if len(stay) < run.cells["of"].max():  # of a pruned model: nothing is known of the heads of other cells
        cells = survivors.groupby("cell")["functions"]
        same = {cell for cell, of in cells if of.notna().all() and len(of) == len(stay)}
        survivors = survivors[survivors["cell"].isin(same)]
    name = f"{model_name(path)} (run {labels.name})"
    return replace(run, survivors=survivors.fillna({"functions": ""}), labelled=name)


def _checkpoints(run: PruningRun, labels: Study) -> tuple[object, object]:
    """What the records say of the checkpoint that was pruned, and of the one whose heads have labels."""
    digests = run.meta.get("digests")
    source = {"digest": digests.get("checkpoint")} if isinstance(digests, dict) else run.meta.get("source")
    return source, labels.record.get("checkpoint")


def _numbered(heads: pd.DataFrame, checkpoint: Path) -> pd.DataFrame:
    """Heads of a model without some, by the numbers that the `pruning.json` beside it gives them."""
    record = read_record((checkpoint if checkpoint.is_dir() else checkpoint.parent) / "pruning.json")
    kept, output = record.get("kept"), record.get("output")
    if record.get("kind") not in ("removal", "shrink") or not isinstance(kept, dict) or not isinstance(output, dict):
        return heads
    try:
        if output.get("export") == "masked":
            return heads[[row.head in kept[row.site][str(row.layer)] for row in heads.itertuples()]]
        numbers = [kept[row.site][str(row.layer)][row.head] for row in heads.itertuples()]
    except (KeyError, IndexError, TypeError):
        raise RunError(f"{checkpoint} has other heads than the pruning.json beside it says; prune again") from None
    return heads.assign(head=numbers)


def _sweep(path: Path) -> PruningRun:
    meta, cells = _json(path / "sweep.json"), _table(path / "sweep.csv", SWEEP)
    if not len(cells):
        raise RunError(f"sweep {path.name}: sweep.csv has no row yet")
    survivors = _table(path / "survivors.csv", (*HEAD_COLUMNS, "cell"))
    gates = {folder.parent.name: folder for folder in sorted(path.glob("runs/*/gates.csv"))}
    return PruningRun(path.resolve().name, meta, cells, survivors, gates, _labelled_by(meta))


def _labelled_by(meta: Mapping[str, Any]) -> str:
    """The model whose heads a sweep has labels of, where that is not the one that it pruned."""
    labelled, digests = meta.get("labelled"), meta.get("digests")
    if not isinstance(labelled, dict) or not isinstance(digests, dict):
        return ""
    same = labelled.get("digest") == digests.get("checkpoint")
    return "" if same else model_name(Path(str(labelled.get("path"))))


def _selections(paths: Sequence[Path]) -> PruningRun:
    """Runs that chose heads once each; the unpruned model is the first cell."""
    rows: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    gates: dict[str, Path] = {}
    metas, names = [_json(path / "pruning.json") for path in paths], _cell_names(paths)
    for number, (path, meta, cell) in enumerate(zip(paths, metas, names, strict=True)):
        if not str(meta.get("kind")).startswith("choice by"):
            raise RunError(
                f"{path} is no run that chose heads; name what `headscope prune l0`, `subset` or `rank` wrote"
            )
        row, kept, removed = _selection(path, meta, cell)
        if number == 0:
            unpruned = {name.replace("of_", "kept_"): count for name, count in row.items() if name.startswith("of_")}
            rows.append({**row, **unpruned, "method": UNPRUNED, "size": "", "kept": row["of"], "cell": UNPRUNED})
            heads += [{**_row(head), "method": UNPRUNED, "size": "", "cell": UNPRUNED} for head in [*kept, *removed]]
        rows.append(row)
        heads += [{**_row(head), "method": row["method"], "size": row["size"], "cell": row["cell"]} for head in kept]
        if (path / "gates.csv").is_file():
            gates[row["cell"]] = path / "gates.csv"
    signatures = "\n".join(dict.fromkeys(str(meta.get("signature", "")) for meta in metas))
    name = ", ".join(path.resolve().name for path in paths[:NAMED]) + (", …" if len(paths) > NAMED else "")
    meta = {**metas[0], "signature": signatures}
    return PruningRun(name, meta, pd.DataFrame(rows), pd.DataFrame(heads), gates)


def _cell_names(paths: Sequence[Path]) -> list[str]:
    """The names of directories, with all that comes before where several have the same."""
    whole = [path.resolve() for path in paths]
    names = [UNPRUNED, *(path.name for path in whole)]
    return [path.name if names.count(path.name) == 1 else str(path) for path in whole]


def _selection(path: Path, meta: Mapping[str, Any], cell: str) -> tuple[dict[str, Any], list[HeadId], list[HeadId]]:
    kept = [HeadId.parse(name) for name in read_text(path / "kept.txt").split()]
    strength = meta.get("learning", {}).get("lambda_paper")
    searched = meta.get("learning", {}).get("lambda_searched", True)
    per_site = meta["kept_per_site"]
    row = {
        "method": meta["method"] if meta["method"] != "rank" else meta["ranking"]["by"],
        "control": "",
        "size": f"keep {meta['kept']}" if strength is None or searched else f"lambda {strength:g}",
        "seed": meta["options"]["seed"],
        "kept": int(meta["kept"]),
        "of": int(meta["heads"]),
        **{f"kept_{site}": int(counts["kept"]) for site, counts in per_site.items()},
        **{f"of_{site}": int(counts["of"]) for site, counts in per_site.items()},
        "cell": cell,
    }
    return row, kept, [HeadId.parse(name) for name in meta["removed"]]


def _row(head: HeadId) -> dict[str, Any]:
    return {"site": head.site.value, "layer": head.layer, "head": head.head}


def _json(path: Path) -> dict[str, Any]:
    return read_object(path, error=RunError)


def _table(path: Path, columns: Iterable[str] = ()) -> pd.DataFrame:
    return read_csv(path, columns=columns, texts=TEXTS, error=RunError)
