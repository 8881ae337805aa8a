"""The cells of a sweep, a method, a size and a seed each, and the files that keep what is finished."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.engine.faithfulness.orders import Scores
from headscope.errors import ConfigError
from headscope.files.output_checks import OutputKind
from headscope.files.reading import read_object
from headscope.files.replace import discard
from headscope.files.tables import write_csv
from headscope.files.writing import write_atomically
from headscope.formats.native import DIRECTORY
from headscope.heads import Layout, all_heads
from headscope.pruning.gate_layout import GateLayout
from headscope.pruning.options.choice import End, learners
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.ranking.allocation import check_keep, nearest_keep
from headscope.pruning.ranking.criterion import Criterion, Direction, criterion_named, rankable_names
from headscope.pruning.selection import CHOICE, STATE
from headscope.registry import unknown
from headscope.training.checkpoints import TRAINING
from headscope.training.from_scratch import FRESH, RUN

UNPRUNED = "unpruned"
CELLS, SCORES, RUNS = "cells", "scores", "runs"
RECORD, TABLE, SURVIVORS = "sweep.json", "sweep.csv", "survivors.csv"
OF_CELL = OutputKind(
    "cell", "run of a cell", "", (CHOICE.record, *CHOICE.writes, *DIRECTORY.in_folder(FRESH), *TRAINING.in_folder(RUN))
)
SWEEP = OutputKind(
    "sweep",
    "run of `headscope prune sweep`",
    RECORD,
    (*(TABLE, SURVIVORS, f"{CELLS}/*.json", f"{SCORES}/*.csv"), *OF_CELL.in_folder(f"{RUNS}/*")),
    extensible=True,
)
Record = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """One entry of the table: `keep` heads or λ, by a method, with a seed; `control`: the same trained from scratch."""

    method: str
    keep: int | None = None
    strength: float | None = None
    seed: int | None = None
    control: bool = False

    @property
    def size(self) -> str:
        """How much stays, or the λ, in words."""
        if self.keep is None and self.strength is None:
            return ""
        return f"keep {self.keep}" if self.strength is None else f"lambda {self.strength:g}"

    @property
    def name(self) -> str:
        """The name of its files."""
        parts = [self.method, self.size.replace(" ", ""), "" if self.seed is None else f"seed{self.seed}"]
        return "-".join(filter(None, [*parts, "from-scratch" if self.control else ""])).replace(":", "-")

    @property
    def folder(self) -> str:
        """The name of the directory of its run; the control's is within."""
        return replace(self, control=False).name


def cells_of(config: SweepConfig, gating: GateLayout, is_drawn: Callable[[str], bool]) -> list[Cell]:
    """All cells of a sweep, the unpruned model first, controls last; rankings that are not drawn have one seed."""
    sizes = sorted({*config.keep, *(nearest_keep(gating, share, config.allocate) for share in config.keep_fraction)})
    for keep in sizes:
        check_keep(gating, keep, config.allocate)
    cells = [Cell(UNPRUNED)]
    for method in config.methods:
        seeds: Sequence[int] = range(config.seed, config.seed + config.seeds)
        if method not in config.learnt and not is_drawn(method) and not config.tune_updates:
            seeds = [config.seed]
        sized = [Cell(method, keep=keep) for keep in sizes]
        if method in config.priced and config.lambdas:
            sized = [Cell(method, strength=strength) for strength in config.lambdas]
        cells += [replace(cell, seed=seed) for cell in sized for seed in seeds]
    if config.from_scratch:
        cells += [replace(cell, control=True) for cell in cells if cell.method in config.learnt]
    return cells


def criterion_of(method: str) -> tuple[Criterion, Direction]:
    """The criterion of a method that ranks, and which end of it stays: NAME, NAME:lowest or NAME:highest."""
    name, colon, end = method.partition(":")
    ends: dict[str, End] = {"lowest": "lowest", "highest": "highest"}
    if name not in rankable_names() or (colon and end not in ends):
        known = [*learners()]
        for other in rankable_names():
            known += [other] if criterion_named(other).keep else [f"{other}:lowest", f"{other}:highest"]
        raise ConfigError(unknown("method", method, sorted(known)))
    criterion = criterion_named(name)
    if not end and not criterion.keep:
        raise ConfigError(
            f"{name} has no agreed direction: write {name}:lowest if heads with low values stay, "
            f"{name}:highest if those with high ones do"
        )
    return criterion, criterion.direction(ends.get(end))


# Files.


def cell_path(folder: Path, name: str) -> Path:
    """The file of a finished cell."""
    return folder / CELLS / f"{name}.json"


def write_cell(folder: Path, cell: Cell, record: Record) -> None:
    """Keep the record of a finished cell."""
    text = json.dumps(record) + "\n"
    write_atomically(cell_path(folder, cell.name), lambda place: place.write_text(text, encoding="utf-8"))


def read_cells(folder: Path) -> dict[str, Record]:
    """The records of finished cells by name; DataError for a file that is none."""
    return {path.stem: read_object(path) for path in sorted((folder / CELLS).glob("[!.]*.json"))}


def clear_cells(folder: Path, missing: Iterable[Cell]) -> None:
    """Remove the records of cells that are done again, and of their runs those that cannot be gone on with."""
    for cell in missing:
        cell_path(folder, cell.name).unlink(missing_ok=True)
        run = folder / RUNS / cell.folder
        if not cell.control and not (run / STATE).is_file():
            discard(run, OF_CELL)


def write_scores(path: Path, scores: Scores, layout: Layout) -> None:
    """Keep scores of all heads."""
    rows = [(head.site.value, head.layer, head.head, scores.get(head)) for head in all_heads(layout)]
    write_csv(path, pd.DataFrame(rows, columns=["site", "layer", "head", "score"]))
