"""Prune by all methods, sizes and seeds, in one folder: what `headscope prune sweep` does.

Every finished cell is one small file in DIR/cells, so a killed sweep resumes with the missing ones. DIR/runs has the
runs of learners, DIR/scores the scores of rankings. Processes of torchrun share the cells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headscope.config.option import changed_options, identity
from headscope.distributed import agree_once
from headscope.errors import ConfigError, flag
from headscope.evaluation.metrics.base import METRICS, check_idle_options
from headscope.files.folders import Workplace, discard, replacing_folder, workplace
from headscope.files.output_checks import check_inputs, contents, inputs_of
from headscope.files.reading import read_record
from headscope.files.tables import write_csv
from headscope.files.writing import write_json
from headscope.progress import Progress, no_progress
from headscope.pruning.options.choice import SweepConfig
from headscope.pruning.scores_file import other_weights
from headscope.pruning.selection import STATE, selection_signature
from headscope.pruning.sweep.cells import (
    CELLS,
    OF_CELL,
    RECORD,
    RUNS,
    SURVIVORS,
    SWEEP,
    TABLE,
    UNPRUNED,
    Cell,
    cell_path,
    read_cells,
    write_cell,
)
from headscope.pruning.sweep.methods import SweepContext, run_cell
from headscope.pruning.sweep.table import make_table, survivors, verdict_lines, verdicts
from headscope.results.sweep import Sweep
from headscope.signature import Signature
from headscope.training.from_scratch import recipe_digest
from headscope.version import VERSION

GRID = {"methods", "keep", "keep_fraction", "lambdas", "seeds"}
"""Options that may differ between calls for one folder; no other option that decides numbers may."""
DIGEST_NAMES = {
    "checkpoint": "checkpoint",
    "source": "text",
    "valid": "validation text",
    "labels": "run with functions",
    "recipe": "recipe, or the run that the checkpoint lies in",
}
"""By name in the record, what must be the same in all calls for one folder."""
POLL = 0.5  # seconds between looks for the cells of other processes


def run_sweep(config: SweepConfig, *, progress: Progress = no_progress) -> Sweep:
    """`run_shared_sweep` in one process."""
    sweep = run_shared_sweep(config, progress=progress)
    assert sweep is not None
    return sweep


def run_shared_sweep(config: SweepConfig, *, progress: Progress = no_progress) -> Sweep | None:
    """Run the cells that are missing in `config.out`, and write the tables.

    Under torchrun every process calls this and runs its share of the cells; the main one waits for the others, which
    return None.
    """
    main_run: list[tuple[SweepContext, Workplace, Mapping[str, Any]]] = []  # empty in all processes but the main one

    def begin() -> tuple[Path, list[Cell]]:
        inputs = inputs_of(config)
        check_inputs(config.out, inputs)
        context = SweepContext(config)
        check_idle_options(config, context.checkpoint, [context.metric])
        record = sweep_record(context)
        resume, earlier_record = find_earlier(record, config)
        record["options"] = {**earlier_record.get("options", {}), **record["options"]}  # of all cells in the folder
        names = set[str]() if resume is None else set(read_cells(resume))
        repeats = {cell.folder for cell in context.cells if cell.name not in names and not cell.control}
        # a cell that runs again may keep other heads, so its control runs again too
        missing = [cell for cell in context.cells if cell.name not in names or cell.folder in repeats]
        opening = workplace(config.out, SWEEP, inputs=inputs, force=config.force, resume=resume)
        workspace = stack.enter_context(opening)
        write_json(workspace.path / RECORD, SWEEP.describe(record))
        for cell in missing:  # remove its old record, and a run that cannot be resumed
            cell_path(workspace.path, cell.name).unlink(missing_ok=True)
            run = workspace.path / RUNS / cell.folder
            if not cell.control and not (run / STATE).is_file():
                discard(run, OF_CELL)
        main_run.append((context, workspace, record))
        return workspace.path, missing

    with ExitStack() as stack, agree_once(begin) as ((folder, missing), processes):
        context = main_run[0][0] if main_run else SweepContext(config)
        context.config = replace(config, out=folder)
        share = processes.share([cell.folder for cell in missing])  # a cell and its control have the same folder
        try:
            cells = [cell for cell in missing if cell.folder in share]
            with progress("sweep", len(cells)) as step:
                for cell in cells:
                    if cell.method in context.criteria:
                        context.scores(cell)
                for cell in sorted(cells, key=lambda cell: cell.control):
                    write_cell(folder, cell, run_cell(context, cell))
                    step(1)
            while main_run and not all(cell_path(folder, cell.name).is_file() for cell in missing):
                time.sleep(POLL)
        except KeyboardInterrupt:
            if main_run and read_cells(folder):
                write_conclusion(context, main_run[0][2])  # of the cells so far
            raise
        if not main_run:
            return None
        write_conclusion(context, main_run[0][2])
        main_run[0][1].finish()
        return Sweep.open(config.out)


def find_earlier(record: Mapping[str, Any], config: SweepConfig) -> tuple[Path | None, Mapping[str, Any]]:
    """The folder of an earlier call of the same sweep, OUT or OUT.new, and its record; (None, {}) if there is none.

    ConfigError where OUT holds a sweep with other options, texts or checkpoint.
    """
    new, why = replacing_folder(config.out), None
    for folder in [new] if config.force else [config.out, new]:
        folder_content = contents(folder, SWEEP)
        if folder_content.kind == SWEEP.name or (folder == config.out and RECORD in folder_content.files):
            change = difference(folder, record, folder_content.record)
            if change is None:
                return folder, folder_content.record
            why = change if folder == config.out else why
    if why:
        raise ConfigError(why)
    return None, {}


def cells_kept(config: SweepConfig) -> tuple[Path, int]:
    """The folder with the cells of an interrupted sweep, and their number."""
    new = replacing_folder(config.out)
    folder = new if config.force and new.is_dir() else config.out
    return folder, len(list((folder / CELLS).glob("*.json")))


def sweep_record(context: SweepContext) -> dict[str, Any]:
    """The record by which a directory of cells is recognised and continued."""
    config, setup, valid = context.config, context.selection, context.data.corpus
    settings = {"metric": context.metric}
    if context.metric == "bleu":
        search = context.checkpoint.search_facts(context.data.options)
        settings |= {"text": config.text, "tok": context.data.text.tokenize, **search}
    if config.trains:
        settings["updates"] = f"{config.updates}+{config.tune_updates}"
    if config.allocate != "global":
        settings["allocate"] = config.allocate
    if config.compensate != "none":
        settings["compensate"] = config.refit.name
    settings["valid"] = f"sha1={valid.digest[:12]},n={valid.count}"
    entries = {**selection_signature("sweep", setup, config, **settings).entries, "boot": str(config.bootstrap)}
    corpora = {"source": setup.corpus, "valid": setup.valid}
    digests = {name: corpus and f"{corpus.digest}-{corpus.count}" for name, corpus in corpora.items()}
    may_differ = {*GRID, *config.unused_options}
    if config.from_scratch:
        digests["recipe"] = recipe_digest(context.recipe)
    if config.relabel and config.functions is not None:
        digests["labels"] = str(read_record(config.functions / "run.json").get("signature"))
    return {
        "headscope": VERSION,
        "signature": str(Signature(entries)),
        "source": {
            "path": config.checkpoint,
            "format": context.checkpoint.format,
            "model_type": context.checkpoint.model_type,
        },
        "digests": {"checkpoint": context.checkpoint.digest, **digests},
        "options": {name: value for name, value in identity(config).items() if name not in may_differ},
        "settings": config.settings(),
        "heads": context.gating.heads,
        "heads_per_site": context.gating.per_site(),
        "metric": context.metric,
        "remarks": setup.remarks,
    }


def difference(folder: Path, record: Mapping[str, Any], earlier_record: Mapping[str, Any]) -> str | None:
    """A message on the option, text or checkpoint in which a folder's `earlier_record` differs; None if none does."""
    options, digests = earlier_record.get("options", {}), earlier_record.get("digests", {})
    advice, now = f"another {flag.out}, or {flag.force} to begin anew", record["options"]
    if changes := changed_options({name: now[name] for name in now if name in options}, options):
        return (
            f"the sweep in {folder} has {flag(changes[0])} {options[changes[0]]!r}, now {now[changes[0]]!r}; give the "
            f"same options, {advice}"
        )
    parts = {
        name: digest for name, digest in record["digests"].items() if name in digests or name in ("source", "valid")
    }
    if changes := changed_options(parts, digests):
        return f"the sweep in {folder} was made with another {DIGEST_NAMES[changes[0]]}; give the same, {advice}"
    return None


def write_conclusion(context: SweepContext, record: Mapping[str, Any]) -> None:
    """Write the tables of all cells in the folder, and its `record` with verdicts and remarks."""
    config = context.config
    records_by_name = read_cells(config.out)
    names = dict.fromkeys([*(cell.name for cell in context.cells), *records_by_name])  # cells of earlier calls last
    records = [records_by_name[name] for name in names if name in records_by_name]
    survivor_table, sites = survivors(records, context.functions), context.gating.per_site()
    notes = [*context.remarks, *other_weights(config.functions, context.checkpoint)]
    for record_of_cell in records:
        if "not_kept" in record_of_cell:
            notes.append(f"no model of {Cell(**record_of_cell['cell']).name} is kept: {record_of_cell['not_kept']}")
    baseline_sums = next((np.array(record["sums"]) for record in records if record["cell"]["method"] == UNPRUNED), None)
    no_verdict = None if baseline_sums is None else context.why_no_baseline(baseline_sums)
    margin = None if no_verdict else config.tolerance
    table = make_table(records, context.bootstrap, margin, sites, context.functions)
    verdict_table = verdicts(records, margin, table)
    for name, frame in ((TABLE, table), (SURVIVORS, survivor_table)):
        write_csv(config.out / name, frame)
    conclusion_fields = {
        "verdicts": json.loads(verdict_table.to_json(orient="records")),  # NaN becomes null
        "conclusions": list(verdict_lines(verdict_table, METRICS.get(context.metric).title)),
        "directions": {method: str(direction) for method, (_, direction) in context.criteria.items()},
        "remarks": [*context.selection.remarks, *([f"no verdict: {no_verdict}"] if no_verdict else []), *notes],
        "missing": [cell.name for cell in context.cells if cell.name not in records_by_name],
    }
    write_json(config.out / RECORD, SWEEP.describe({**record, **conclusion_fields}))
