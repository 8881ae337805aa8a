"""Methods × sizes × seeds in one directory: what `headscope prune sweep` does.

Every cell that is finished is one small file in DIR/cells, written under a temporary name and renamed, so a killed
sweep goes on with what is missing. `sweep.csv` has a row a cell, `survivors.csv` a row for every head that a cell
keeps, `sweep.json` what shaped them; DIR/runs has what learning wrote, DIR/scores what rankings are by.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from headscope.errors import ConfigError
from headscope.files.folders import Workplace, replacing_folder, workplace
from headscope.files.output_checks import inputs_of
from headscope.files.output_kind import OutputKind, contents
from headscope.files.reading import read_record
from headscope.files.writing import write_json, written
from headscope.formats.native import DIRECTORY
from headscope.heads import SITES
from headscope.progress import Progress, no_progress
from headscope.pruning.ranking.scores_file import read_heads
from headscope.pruning.selection import CHOICE, selection_signature
from headscope.pruning.sweep.bench import RUNS, SCORES, Bench
from headscope.pruning.sweep.config import Cell, SweepConfig, config_identity
from headscope.pruning.sweep.files import CELLS, cell_names, cell_path, read_cell
from headscope.pruning.sweep.scratch import recipe, recipe_digest, transformer
from headscope.pruning.sweep.table import make_table, survivors, unharmed
from headscope.pruning.sweep.work import (
    Launch,
    until,
    work,
)
from headscope.results import Signature
from headscope.training.files.outputs import TRAINING
from headscope.version import VERSION

RECORD, TABLE, SURVIVORS = "sweep.json", "sweep.csv", "survivors.csv"
_RUN = f"{RUNS}/*"
SWEEP = OutputKind(
    "sweep",
    "run of `headscope prune sweep`",
    RECORD,
    (
        *(TABLE, SURVIVORS, f"{CELLS}/*.json", f"{SCORES}/*.csv"),
        *CHOICE.within(_RUN),
        *DIRECTORY.within(f"{_RUN}/fresh"),
        *TRAINING.within(f"{_RUN}/scratch"),
    ),
    goes_on=True,
)


@dataclass(frozen=True)
class Sweep:
    """What a sweep found: the table, which heads stay in each cell, and the fewest heads that do no harm by method.

    Of several processes the first alone has them; the tables are empty in the others (`main` is False).
    """

    bench: Bench
    table: pd.DataFrame
    survivors: pd.DataFrame
    unharmed: pd.DataFrame
    main: bool = True

    @property
    def signature(self) -> Signature:
        """What shaped the numbers."""
        return _signature(self.bench)

    @property
    def remarks(self) -> list[str]:
        """What the user should know."""
        return list(self.bench.opened.remarks)

    def record(self) -> dict[str, Any]:
        """As JSON values; NaN becomes null."""
        tables = {"cells": self.table, "unharmed": self.unharmed}
        rows = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        return {"signature": str(self.signature), "remarks": self.remarks, **rows}


def run_sweep(config: SweepConfig, *, progress: Progress = no_progress) -> Sweep:
    """Do the cells that are missing in `config.out`, and write the tables.

    HeadscopeError for whatever the user can fix, before anything is learnt as far as that can be known. Under
    torchrun every process calls this and does its share of the cells; the first waits for the others.
    """
    with Launch() as launch, ExitStack() as stack:
        place: list[Workplace] = []

        def begin() -> Bench:
            bench, resume = prepared(config)
            inputs = inputs_of(config)
            place[:] = [
                stack.enter_context(workplace(config.out, SWEEP, inputs=inputs, force=config.force, resume=resume))
            ]
            bench.config = replace(config, out=place[0].path)
            _write_record(bench)
            return bench

        bench, (folder, missing) = launch.meet(
            begin,
            lambda bench: (bench.config.out, unfinished(bench)),
            lambda said: Bench(replace(config, out=said[0])),
        )
        try:
            work(bench, launch.share(missing), progress=progress)
            if launch.main:
                until(lambda: all(cell_path(folder, cell.name).is_file() for cell in missing))
        except KeyboardInterrupt:
            if launch.main and cell_names(folder):
                conclude(bench)
            raise
        if not launch.main:
            nothing = pd.DataFrame()
            return Sweep(bench, nothing, nothing, nothing, main=False)
        found = conclude(bench)
        place[0].finish()
        bench.config = replace(bench.config, out=config.out)
        return found


def unfinished(bench: Bench) -> list[Cell]:
    """The cells that the directory lacks."""
    return [cell for cell in bench.cells if not cell_path(bench.config.out, cell.name).is_file()]


def prepared(config: SweepConfig) -> tuple[Bench, Path | None]:
    """Open everything and check it; also the directory of the same sweep to go on with, if there is one."""
    bench = Bench(config)
    if config.from_scratch:
        transformer(bench.checkpoint)
        recipe(config, bench.checkpoint)
    if config.functions is not None:
        read_functions(config.functions, bench)
    record, new = _record(bench), replacing_folder(config.out)
    for place in [new] if config.force else [config.out, new]:
        if contents(place, SWEEP).kind == SWEEP.name and _difference(place, record) is None:
            return bench, place
    if not config.force and (config.out / RECORD).is_file():
        raise ConfigError(_difference(config.out, record))
    return bench, None


def cells_kept(config: SweepConfig) -> tuple[Path, int]:
    """Where the cells of a sweep are that was interrupted, and how many."""
    new = replacing_folder(config.out)
    folder = new if config.force and new.is_dir() else config.out
    return folder, len(cell_names(folder))


def _record(bench: Bench) -> dict[str, Any]:
    config, opened = bench.config, bench.opened
    corpora = {"source": opened.corpus, "valid": opened.valid}
    digests = {name: None if each is None else f"{each.digest}-{each.count}" for name, each in corpora.items()}
    if config.from_scratch:
        digests["recipe"] = recipe_digest(config, bench.checkpoint)
    return {
        "headscope": VERSION,
        "signature": str(_signature(bench)),
        "source": {
            "path": config.checkpoint,
            "format": bench.checkpoint.format,
            "model_type": bench.checkpoint.model_type,
        },
        "digests": {"checkpoint": bench.checkpoint.digest, **digests, "labels": list(bench.data.labels)},
        "options": json.loads(json.dumps(config_identity(config))),
        "settings": json.loads(json.dumps(config.settings())),
        "heads": bench.gating.heads,
        "heads_per_site": sites_of(bench),
        "metric": bench.metric,
        "remarks": opened.remarks,
    }


def sites_of(bench: Bench) -> dict[str, int]:
    """Heads of the gated sites, by site."""
    counts = bench.gating.counts
    there = [site for site in SITES if any(place[0] is site for place in counts)]
    return {site.value: sum(count for place, count in counts.items() if place[0] is site) for site in there}


def _difference(folder: Path, record: dict[str, Any]) -> str | None:
    """In what options, texts or checkpoint the cells that a directory holds differ; None: in nothing."""
    theirs = read_record(folder / RECORD)
    options, digests = theirs.get("options"), theirs.get("digests")
    if not isinstance(options, dict) or not isinstance(digests, dict):
        return f"{folder / RECORD} cannot be read; choose another --out, or --force to begin anew"
    mine = record["options"]
    if changed := [name for name in mine if options.get(name) != mine[name]]:
        return (
            f"the sweep in {folder} has --{changed[0].replace('_', '-')} {options.get(changed[0])}, now "
            f"{mine[changed[0]]}; give the same options, another --out, or --force to begin anew"
        )
    before = {"recipe": record["digests"].get("recipe"), **digests}  # which older records lack
    if changed := [name for name, value in record["digests"].items() if before.get(name) != value]:
        what = {"checkpoint": "checkpoint", "source": "--source or --target", "labels": "--valid-labels"}
        what["recipe"] = "recipe (--recipe, or the run that the checkpoint lies in)"
        return (
            f"the sweep in {folder} was made with another {what.get(changed[0], 'validation text')}; give the same, "
            "another --out, or --force to begin anew"
        )
    return None


def _write_record(bench: Bench, **more: Any) -> None:
    write_json(bench.config.out / RECORD, SWEEP.described(_record(bench) | more))


def _signature(bench: Bench) -> Signature:
    config, valid = bench.config, bench.data.corpus
    how = {"metric": bench.metric}
    if bench.metric == "bleu":
        how |= {"text": config.text, **bench.checkpoint.search_facts(bench.data.options)}
    if config.trains:
        how["updates"] = f"{config.updates}+{config.tune_updates}"
    how["valid"] = f"sha1={valid.digest[:12]},n={valid.count}"
    made = selection_signature("sweep", bench.opened, config, **how)
    return Signature({**made.entries, "boot": str(config.bootstrap)})


def read_functions(run: Path, bench: Bench) -> pd.DataFrame:
    """The labels of heads in a run of `analyze`; ConfigError where it has none."""
    table = read_heads(run, bench.checkpoint.layout)
    if "functions" not in table:
        raise ConfigError(
            f"--functions {run}: its heads.csv has no column functions; name a run of `headscope analyze`"
        )
    return table.fillna({"functions": ""})


def conclude(bench: Bench) -> Sweep:
    """The tables of all cells that a directory holds, written there."""
    config = bench.config
    records = [read_cell(config.out, name) for name in _names(config.out, bench.cells)]
    functions = None if config.functions is None else read_functions(config.functions, bench)
    table = make_table(records, config, sites_of(bench), functions)
    kept = survivors(records, functions)
    for name, frame in ((TABLE, table), (SURVIVORS, kept)):
        written(config.out / name, lambda path, frame=frame: frame.to_csv(path, index=False))  # type: ignore[misc]
    found = Sweep(bench, table, kept, unharmed(table, within=config.within))
    _write_record(bench, unharmed=found.record()["unharmed"])
    return found


def _names(folder: Path, cells: Iterable[Cell]) -> list[str]:
    """Finished cells of this call in its order, then those of earlier calls."""
    there = cell_names(folder)
    mine = [cell.name for cell in cells if cell.name in set(there)]
    return [*mine, *(name for name in there if name not in set(mine))]
