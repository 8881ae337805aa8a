"""What `headscope prune sweep`, `l0`, `subset` and `rank` wrote, read back for figures: one table of cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.heads import SITES
from headscope.report.run import UNTELLING as MODELS
from headscope.report.run import RunError, load_run

SWEEP = {"method", "control", "size", "seed", "kept", "of", "metric", "value", "low", "high", "difference", "loss"}
PLACE = ["site", "layer", "head"]
GATES = {"update", *PLACE, "gate", "open"}
UNPRUNED = "unpruned"
UNTELLING = {*MODELS, "averaged", "best", "last"}
TEXTS = ("method", "control", "size", "metric", "cell", "site", "functions")


@dataclass(frozen=True)
class Pruned:
    """Cells with their sizes, the heads that each keeps, and trajectories of gates by name of the cell.

    `cells` has method, control, size, seed, kept, of, kept_SITE and cell; of a sweep also the columns of quality
    (`measured`). `survivors` has a row for every head that stays; `functions` where labels are known.
    """

    name: str
    meta: Mapping[str, Any]
    cells: pd.DataFrame
    survivors: pd.DataFrame
    gates: Mapping[str, Path] = field(default_factory=dict)

    @property
    def measured(self) -> bool:
        """Whether there are numbers of quality."""
        return "value" in self.cells

    @property
    def sites(self) -> list[str]:
        """The gated sites."""
        return [site.value for site in SITES if f"kept_{site.value}" in self.cells]

    @property
    def model(self) -> str:
        """The last part of the checkpoint's path, with the one before it where it tells nothing."""
        path = Path(str(self.meta.get("source", {}).get("path", "model")))
        return "/".join(path.parts[-2:]) if path.name in UNTELLING else path.name

    def trajectory(self, cell: str) -> pd.DataFrame:
        """The gates of a cell while they learnt."""
        table = _table(self.gates[cell])
        if not set(table.columns) >= GATES or not len(table):
            raise RunError(f"{self.gates[cell]} holds no trajectory of gates; learn again")
        return table


def load_pruned(paths: Sequence[Path], *, functions: Path | None = None) -> list[Pruned]:
    """Read sweeps; runs of `l0`, `subset` and `rank` are put together as if they were one.

    `functions` is a run of `analyze` that labels heads. RunError for a directory that is neither.
    """
    sweeps, choices = [], []
    for path in paths:
        inner = sorted(path.glob("lambda-*/pruning.json"))
        if (path / "sweep.json").is_file():
            sweeps.append(_sweep(path))
        elif (path / "pruning.json").is_file() or inner:
            choices += [each.parent for each in inner] or [path]
        else:
            raise RunError(
                f"{path} has neither sweep.json nor pruning.json; name what `headscope prune sweep`, `l0`, `subset` "
                "or `rank` wrote"
            )
    found = [*sweeps, *([_choices(choices)] if choices else [])]
    if functions is None:
        return found
    labels = load_run(functions).heads[[*PLACE, "functions"]]
    return [replace(each, survivors=_labelled(each.survivors, labels)) for each in found]


def _labelled(survivors: pd.DataFrame, labels: pd.DataFrame) -> pd.DataFrame:
    bare = survivors.drop(columns="functions", errors="ignore")
    return bare.merge(labels, on=PLACE, how="left").fillna({"functions": ""})


def _sweep(path: Path) -> Pruned:
    meta, cells = _json(path / "sweep.json"), _table(path / "sweep.csv")
    if lacking := SWEEP - set(cells.columns):
        raise RunError(f"sweep {path.name}: sweep.csv has no column {sorted(lacking)[0]}; run the sweep again")
    if not len(cells):
        raise RunError(f"sweep {path.name}: sweep.csv has no row yet")
    survivors = _table(path / "survivors.csv")
    found = {folder.parent.name: folder for folder in sorted(path.glob("runs/*/gates.csv"))}
    return Pruned(path.resolve().name, meta, cells, survivors, found)


def _choices(paths: Sequence[Path]) -> Pruned:
    """Runs that chose heads once each; the unpruned model is the first cell."""
    rows: list[dict[str, Any]] = []
    heads: list[dict[str, Any]] = []
    gates: dict[str, Path] = {}
    metas = [_json(path / "pruning.json") for path in paths]
    for number, (path, meta) in enumerate(zip(paths, metas, strict=True)):
        try:
            row, kept, gone = _choice(path, meta)
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise RunError(f"{path} is no run that chose heads ({type(error).__name__}: {error})") from None
        if number == 0:
            whole = {name.replace("of_", "kept_"): count for name, count in row.items() if name.startswith("of_")}
            rows.append({**row, **whole, "method": UNPRUNED, "size": "", "kept": row["of"], "cell": UNPRUNED})
            heads += [{**_head(name), "method": UNPRUNED, "size": "", "cell": UNPRUNED} for name in [*kept, *gone]]
        rows.append(row)
        heads += [{**_head(name), "method": row["method"], "size": row["size"], "cell": row["cell"]} for name in kept]
        if (path / "gates.csv").is_file():
            gates[row["cell"]] = path / "gates.csv"
    signatures = "\n".join(dict.fromkeys(str(meta.get("signature", "")) for meta in metas))
    return Pruned(
        paths[0].resolve().name, {**metas[0], "signature": signatures}, pd.DataFrame(rows), pd.DataFrame(heads), gates
    )


def _choice(path: Path, meta: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], list[str]]:
    if meta["kind"] != "choice":
        raise ValueError(f"kind {meta['kind']}")
    kept = (path / "kept.txt").read_text(encoding="utf-8").split()
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
        **{f"kept_{site}": int(each["kept"]) for site, each in per_site.items()},
        **{f"of_{site}": int(each["of"]) for site, each in per_site.items()},
        "cell": path.resolve().name,
    }
    return row, kept, list(meta["removed"])


def _head(name: str) -> dict[str, Any]:
    site, layer, head = name.split(".")
    return {"site": site, "layer": int(layer), "head": int(head)}


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read ({' '.join(str(error).split())[:120]})") from None
    if not isinstance(found, dict):
        raise RunError(f"{path} is no record of pruning")
    return found


def _table(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(path, encoding="utf-8", dtype=dict.fromkeys(TEXTS, str))
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise RunError(f"{path} cannot be read ({' '.join(str(error).split())[:120]})") from None
    return table.fillna({name: "" for name in TEXTS if name in table})
