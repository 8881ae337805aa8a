"""Methods × sizes × seeds in one directory: what `headscope prune sweep` does.

Every cell that is finished is one small file in DIR/cells, written under a temporary name and renamed, so a killed
sweep goes on with what is missing. `sweep.csv` has a row a cell, `survivors.csv` a row for every head that a cell
keeps, `sweep.json` what shaped them; DIR/runs has what learning wrote, DIR/scores what rankings are by. Cells are done
by this process, by several that it starts (--jobs), or by those that torchrun started.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from headscope.config.option import changed, flag, identity
from headscope.distributed import IndependentProcesses
from headscope.errors import ConfigError, DataError, TrainingError
from headscope.files.folders import Workplace, replacing_folder, workplace
from headscope.files.output_checks import OutputKind, contents, inputs_of
from headscope.files.reading import read_record
from headscope.files.replace import discard
from headscope.files.writing import write_atomically, write_json
from headscope.formats.native import DIRECTORY
from headscope.model.process_settings import process_settings
from headscope.progress import Progress, no_progress
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.selection import CHOICE, STATE, selection_signature
from headscope.pruning.sweep.cell_files import (
    CELLS,
    SCORES,
    cell_names,
    cell_path,
    finished_cells,
    kept_scores,
    write_cell,
)
from headscope.pruning.sweep.cells import RUNS, SweepContext, run_cell
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.functions import read_functions
from headscope.pruning.sweep.kept_models import check_keeping, kept_remarks, on_one_device
from headscope.pruning.sweep.table import MeasuredCells, make_table, survivors, verdict_lines, verdicts
from headscope.results import Signature
from headscope.training.files.outputs import TRAINING
from headscope.training.from_scratch import FRESH, RUN, recipe_digest
from headscope.version import VERSION

RECORD, TABLE, SURVIVORS = "sweep.json", "sweep.csv", "survivors.csv"
OF_CELL = OutputKind(
    "cell", "run of a cell", "", (CHOICE.record, *CHOICE.writes, *DIRECTORY.in_folder(FRESH), *TRAINING.in_folder(RUN))
)
SWEEP = OutputKind(
    "sweep",
    "run of `headscope prune sweep`",
    RECORD,
    (*(TABLE, SURVIVORS, f"{CELLS}/*.json", f"{SCORES}/*.csv", f"{SCORES}/*.json"), *OF_CELL.in_folder(f"{RUNS}/*")),
    extensible=True,
)
GRID = {"methods", "keep", "fractions", "lambdas", "seeds"}
"""Options that may change while cells are added to a directory; all others that shape numbers must not."""
POLL = 0.5  # seconds
Task = Cell | tuple[str, int]
"""A cell, or the scores of heads by one criterion and seed."""


@dataclass(frozen=True)
class Sweep:
    """The table of a sweep, the heads that stay in each cell, and the verdict on every method and size.

    `baseline` says why there are no verdicts, `notes` of which cells no model is kept. Of several processes the first
    alone has them; the tables are empty in the others (`main` is False).
    """

    context: SweepContext
    table: pd.DataFrame
    survivors: pd.DataFrame
    verdicts: pd.DataFrame
    baseline: str | None = None
    notes: Sequence[str] = ()
    main: bool = True

    @property
    def signature(self) -> Signature:
        """What shaped the numbers."""
        return _signature(self.context)

    @property
    def remarks(self) -> list[str]:
        """What the user should know."""
        verdict = [f"no verdict: {self.baseline}"] if self.baseline else []
        return [*self.context.opened.remarks, *verdict, *self.notes]

    @property
    def conclusions(self) -> list[str]:
        """By method how many heads can go, and what the text could have seen."""
        return list(verdict_lines(self.verdicts, self.context.metric_title))

    def record(self) -> dict[str, Any]:
        """As JSON values; NaN becomes null."""
        tables = {"cells": self.table, "verdicts": self.verdicts}
        rows = {name: json.loads(table.to_json(orient="records")) for name, table in tables.items()}
        return {
            "signature": str(self.signature),
            "remarks": self.remarks,
            "directions": self.context.directions,
            "conclusions": self.conclusions,
            **rows,
        }


def run_sweep(config: SweepConfig, *, progress: Progress = no_progress) -> Sweep:
    """Do the cells that are missing in `config.out`, and write the tables.

    HeadscopeError for whatever the user can fix, before anything is learnt as far as that can be known. Under
    torchrun every process calls this and does its share of the cells; the first waits for the others.
    """
    with IndependentProcesses() as processes, ExitStack() as stack:
        begun: list[tuple[SweepContext, Workplace]] = []  # of the first process

        def begin() -> tuple[Path, list[Cell]]:
            context, resume = prepared(config)
            inputs = inputs_of(config)
            workspace = stack.enter_context(
                workplace(config.out, SWEEP, inputs=inputs, force=config.force, resume=resume)
            )
            context.config = replace(config, out=workspace.path)
            write_record(context)
            begun.append((context, workspace))
            return workspace.path, _missing(context)

        folder, missing = processes.agree(begin)
        context = begun[0][0] if begun else SweepContext(replace(config, out=folder))
        share = processes.share([cell.folder for cell in missing])  # a control goes with what it is a control of
        try:
            do_cells(context, [cell for cell in missing if cell.folder in share], progress=progress)
            while begun and not all(cell_path(folder, cell.name).is_file() for cell in missing):
                time.sleep(POLL)
        except KeyboardInterrupt:
            if begun and cell_names(folder):
                write_conclusion(context)
            raise
        if not begun:
            return Sweep(context, pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), main=False)
        result = write_conclusion(context)
        begun[0][1].finish()
        context.config = replace(context.config, out=config.out)
        return result


def _missing(context: SweepContext) -> list[Cell]:
    """The cells that are to be done: those without a record, and those whose record was damaged, with a remark.

    The control of a cell that is done again is too, as other heads may stay.
    """
    folder = context.config.out
    found = finished_cells(folder, context.gating, context.metric)
    again = {cell.folder for cell in context.cells if cell.name not in found.records and not cell.control}
    missing = [cell for cell in context.cells if cell.name not in found.records or cell.folder in again]
    names = {cell.name for cell in missing}
    for path in (cell_path(folder, name) for name in names):
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise DataError(f"{path} cannot be removed ({error.strerror}); do that yourself") from None
    for run in (folder / RUNS / name for name in again):
        if not (run / STATE).is_file():  # there is nothing to resume
            discard(run, OF_CELL)
    fate = {True: "the cell was done again", False: "left out: name its method, size and seed to do it again"}
    context.opened.remarks += [f"{why}; {fate[name in names]}" for name, why in found.damaged.items()]
    return missing


def prepared(config: SweepConfig) -> tuple[SweepContext, Path | None]:
    """Open everything and check it; also the directory of the same sweep to go on with, if there is one."""
    context = SweepContext(config)
    if config.from_scratch:
        context.recipe()
    if config.functions is not None:
        read_functions(config.functions, context.checkpoint)
    _ = context.labeller
    if config.keep_models:
        check_keeping(on_one_device(context.checkpoint, config), context.gating)
    new = replacing_folder(config.out)
    for folder in [new] if config.force else [config.out, new]:
        if contents(folder, SWEEP).kind == SWEEP.name and difference(folder, context) is None:
            return context, folder
    if not config.force and (config.out / RECORD).is_file():
        raise ConfigError(difference(config.out, context))
    return context, None


def cells_kept(config: SweepConfig) -> tuple[Path, int]:
    """Where the cells of a sweep are that was interrupted, and how many."""
    new = replacing_folder(config.out)
    folder = new if config.force and new.is_dir() else config.out
    return folder, len(cell_names(folder))


def do_cells(context: SweepContext, cells: Sequence[Cell], *, progress: Progress = no_progress) -> None:
    """Do cells and keep their records: scores of heads first, controls last."""
    scores: list[Task] = []
    for ranking in context.rankings(cells):
        path = context.scores_path(*ranking)
        if kept_scores(path, context.checkpoint.layout) is None:
            scores.append(ranking)
            if path.exists():
                context.opened.remarks.append(f"{path} was changed after it was written; heads were scored again")
    pruned: list[Task] = [cell for cell in cells if not cell.control]
    controls: list[Task] = [cell for cell in cells if cell.control]
    with progress("sweep", len(cells)) as step, _workers(context) as do:
        for phase, count in ((scores, 0), (pruned, 1), (controls, 1)):
            for _ in do(phase):
                step(count)


def do_task(context: SweepContext, task: Task) -> None:
    """One cell, or the scores of one criterion."""
    if isinstance(task, Cell):
        write_cell(context.config.out, task, run_cell(context, task))
    else:
        context.scores(*task)


@contextmanager
def _workers(context: SweepContext) -> Iterator[Callable[[Sequence[Task]], Iterator[None]]]:
    """What does tasks, here or in `jobs` processes, and yields after each of them."""
    jobs = context.config.jobs
    if jobs == 1:
        yield lambda tasks: map(partial(do_task, context), tasks)
        return
    threads = max(1, torch.get_num_threads() // jobs)
    before = set(multiprocessing.active_children())
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(jobs, mp_context=spawn, initializer=_enter, initargs=(context.config, threads))
    try:
        yield lambda tasks: _in_pool(pool, tasks)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
            child.join(POLL)
        raise


def _in_pool(pool: ProcessPoolExecutor, tasks: Sequence[Task]) -> Iterator[None]:
    try:
        for future in as_completed([pool.submit(_do_in_worker, task) for task in tasks]):
            yield future.result()
    except BrokenProcessPool:
        raise TrainingError(
            "a process of --jobs was killed, perhaps for want of memory; what is finished is kept: run the same "
            "command again, with fewer --jobs"
        ) from None


_CONFIG: list[SweepConfig] = []
_CONTEXT: list[SweepContext] = []


def _enter(config: SweepConfig, threads: int) -> None:
    """A process of --jobs: leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        ended = partial(wait, [parent.sentinel])
        threading.Thread(target=lambda: (ended(), os._exit(1)), daemon=True).start()
    torch.set_num_threads(threads)
    _CONFIG[:] = [config]


def _do_in_worker(task: Task) -> None:
    if not _CONTEXT:  # opened once in each process
        _CONTEXT.append(SweepContext(_CONFIG[0]))
    with process_settings():  # the process is the sweep's own
        do_task(_CONTEXT[0], task)


def _record(context: SweepContext) -> dict[str, Any]:
    config, opened = context.config, context.opened
    corpora = {"source": opened.corpus, "valid": opened.valid}
    digests = {name: corpus and f"{corpus.digest}-{corpus.count}" for name, corpus in corpora.items()}
    if config.from_scratch:
        digests["recipe"] = recipe_digest(context.recipe())
    if context.labeller is not None:
        digests["labels"] = context.labeller.digest
    return {
        "headscope": VERSION,
        "signature": str(_signature(context)),
        "source": {
            "path": config.checkpoint,
            "format": context.checkpoint.format,
            "model_type": context.checkpoint.model_type,
        },
        "digests": {"checkpoint": context.checkpoint.digest, **digests},
        "options": {name: value for name, value in identity(config).items() if name not in GRID},
        "settings": config.settings(),
        "heads": context.gating.heads,
        "heads_per_site": context.gating.per_site(),
        "metric": context.metric,
        "remarks": opened.remarks,
    }


def difference(folder: Path, context: SweepContext) -> str | None:
    """In what options, texts or checkpoint the cells that a directory holds differ; None: in nothing."""
    record, saved = _record(context), read_record(folder / RECORD)
    options, digests = saved.get("options"), saved.get("digests")
    if not isinstance(options, dict) or not isinstance(digests, dict):
        return f"{folder / RECORD} cannot be read; choose another --out, or --force to begin anew"
    if others := changed(record["options"], options, SweepConfig):
        return (
            f"the sweep in {folder} has {flag(others[0])} {options.get(others[0])}, now "
            f"{record['options'][others[0]]}; give the same options, another --out, or --force to begin anew"
        )
    before = {name: record["digests"].get(name) for name in ("recipe", "labels")} | digests  # which older records lack
    if others := [name for name, value in record["digests"].items() if before.get(name) != value]:
        what = {"checkpoint": "checkpoint", "source": "--source, --target or --labels"}
        what["labels"] = "run of --functions"
        what["recipe"] = "recipe (--recipe, or the run that the checkpoint lies in)"
        return (
            f"the sweep in {folder} was made with another {what.get(others[0], 'validation text')}; give the same, "
            "another --out, or --force to begin anew"
        )
    return None


def write_record(context: SweepContext, **more: Any) -> None:
    """Say what a directory of cells is: with it they are known, and gone on with."""
    write_json(context.config.out / RECORD, SWEEP.described(_record(context) | more))


def _signature(context: SweepContext) -> Signature:
    config, valid = context.config, context.data.corpus
    how = {"metric": context.metric}
    if context.metric == "bleu":
        how |= {"text": config.text, **context.checkpoint.search_facts(context.data.options)}
    if config.trains:
        how["updates"] = f"{config.updates}+{config.tune_updates}"
    if config.allocate != "global":
        how["allocate"] = config.allocate
    if config.compensate != "none":
        how["compensate"] = config.refit.name
    how["valid"] = f"sha1={valid.digest[:12]},n={valid.count}"
    made = selection_signature("sweep", context.opened, config, **how)
    return Signature({**made.entries, "boot": str(config.bootstrap)})


def write_conclusion(context: SweepContext) -> Sweep:
    """The tables of all cells that a directory holds, written there."""
    config = context.config
    found = finished_cells(config.out, context.gating, context.metric)
    names = dict.fromkeys([*(cell.name for cell in context.cells), *found.records])  # those of earlier calls come last
    if broken := [name for name in names if name in found.damaged]:
        raise DataError(f"{found.damaged[broken[0]]}; the same command does it again")
    records = [found.records[name] for name in names if name in found.records]
    functions = None if config.functions is None else read_functions(config.functions, context.checkpoint)
    sites = context.gating.per_site()
    unpruned = next((np.array(record["sums"]) for record in records if record["cell"]["method"] == UNPRUNED), None)
    baseline = None if unpruned is None else context.why_no_baseline(unpruned)
    if unpruned is not None:
        context.check_baseline(unpruned)
    measured = MeasuredCells.of(records, config, margin=None if baseline else config.tolerance)
    table = make_table(measured, sites, functions)
    kept = survivors(records, functions)
    for name, frame in ((TABLE, table), (SURVIVORS, kept)):
        write_atomically(config.out / name, lambda path, frame=frame: frame.to_csv(path, index=False))  # type: ignore[misc]
    notes = kept_remarks(records, config.out) if config.keep_models else []
    result = Sweep(context, table, kept, verdicts(measured, sites), baseline, notes)
    record = result.record()
    said = {name: record[name] for name in ("verdicts", "conclusions", "directions", "remarks")}
    labelled = None if config.functions is None else read_record(config.functions / "run.json").get("checkpoint")
    write_record(context, **said, labelled=labelled)
    return result
