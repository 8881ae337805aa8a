"""Methods × sizes × seeds in one directory: what `headscope prune sweep` does.

Every cell that is finished is one small file in DIR/cells, written under a temporary name and renamed, so a killed
sweep goes on with what is missing. `sweep.csv` has a row a cell, `survivors.csv` a row for every head that a cell
keeps, `sweep.json` what shaped them; DIR/runs has what learning wrote, DIR/scores what rankings are by. Cells are done
by this process, by several that it starts (--jobs), or by those that torchrun started.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from headscope.evaluation.metrics.base import check_hiding
from headscope.files.folders import Workplace, replacing_folder, workplace
from headscope.files.output_checks import check_inputs, inputs_of
from headscope.files.reading import read_objects, read_record
from headscope.files.tables import write_csv
from headscope.files.writing import write_json
from headscope.progress import Progress, no_progress
from headscope.pruning.options.sweep import SweepConfig
from headscope.pruning.scores_file import other_weights
from headscope.pruning.sweep.cell_files import (
    CELLS,
    RECORD,
    SURVIVORS,
    SWEEP,
    TABLE,
    Begun,
    Record,
    cell_names,
    cell_path,
    clear_cells,
    finished_cells,
    sweeps_begun,
    write_cell,
)
from headscope.pruning.sweep.cells import SweepContext, run_cell
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.kept_models import check_keeping, kept_remarks, on_one_device
from headscope.pruning.sweep.result import Sweep, sweep_signature
from headscope.pruning.sweep.table import MeasuredCells, make_table, survivors, verdicts
from headscope.training.from_scratch import recipe_digest
from headscope.version import VERSION

GRID = {"methods", "keep", "keep_fraction", "lambdas", "seeds"}
"""Options that may change while cells are added to a directory; all others that shape numbers must not."""
SAID = ("verdicts", "conclusions", "directions", "remarks")
POLL = 0.5  # seconds
Task = Cell | tuple[str, int]
"""A cell, or the scores of heads by one criterion and seed."""


def run_sweep(config: SweepConfig, *, progress: Progress = no_progress) -> Sweep:
    """Do the cells that are missing in `config.out`, and write the tables.

    HeadscopeError for whatever the user can fix, before anything is learnt as far as that can be known. Under
    torchrun every process calls this and does its share of the cells; the first waits for the others.
    """
    with IndependentProcesses() as processes, ExitStack() as stack:
        begun: list[tuple[SweepContext, Workplace, Mapping[str, Any]]] = []  # of the first process

        def begin() -> tuple[Path, list[Cell]]:
            before, inputs = sweeps_begun(config), inputs_of(config)
            check_inputs(config.out, inputs)
            context = opened_sweep(config)
            record = sweep_record(context)
            cells, resume = to_go_on_with(before, record, config)
            record = next((with_earlier(record, each.record) for each in before if each.folder == resume), record)
            missing, again = _missing(context, cells, resume or config.out)
            place = workplace(config.out, SWEEP, inputs=inputs, force=config.force, resume=resume)
            workspace = stack.enter_context(place)
            write_json(workspace.path / RECORD, SWEEP.described(record))
            clear_cells(workspace.path, missing, again)
            begun.append((context, workspace, record))
            return workspace.path, missing

        folder, missing = processes.agree(begin)
        context = begun[0][0] if begun else SweepContext(config)
        context.config = replace(config, out=folder)
        share = processes.share([cell.folder for cell in missing])  # a control goes with what it is a control of
        stopped: KeyboardInterrupt | None = None
        try:
            do_cells(context, [cell for cell in missing if cell.folder in share], progress=progress)
            while begun and not all(cell_path(folder, cell.name).is_file() for cell in missing):
                time.sleep(POLL)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt
        if stopped and not (begun and cell_names(folder)):
            raise stopped
        if not begun:
            return Sweep(context, pd.DataFrame(), pd.DataFrame(), pd.DataFrame(), main=False)
        result = write_conclusion(context, begun[0][2])  # of an interrupted sweep as far as it went
        if stopped:
            raise stopped
        begun[0][1].finish()
        context.config = replace(context.config, out=config.out)
        return result


def opened_sweep(config: SweepConfig) -> SweepContext:
    """What the config names, opened, and checked before anything is learnt as far as that can be."""
    context = SweepContext(config)
    check_hiding(config, context.checkpoint, [context.metric])
    _ = context.functions, context.labeller
    if config.keep_models:
        check_keeping(on_one_device(context.checkpoint, config), context.gating)
    return context


def to_go_on_with(
    begun: Sequence[Begun], record: Mapping[str, Any], config: SweepConfig
) -> tuple[Mapping[str, Record | DataError], Path | None]:
    """The cells and the directory of the same sweep (None: there is none); ConfigError where `out` holds another."""
    others = {each.folder: difference(each.folder, record, each.record) for each in begun}
    for each in begun:
        if others[each.folder] is None:
            return each.cells, each.folder
    if config.out in others:
        raise ConfigError(others[config.out])
    return {}, None


def with_earlier(record: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """A record with the options that its own cells do not use as earlier cells were made with them."""
    used = set(saved["options"]) - set(saved.get("unused", ()))
    earlier = {name: saved["options"][name] for name in record["unused"] if name in used}
    unused = [name for name in record["unused"] if name not in used]
    return {**record, "options": {**record["options"], **earlier}, "unused": unused}


def _missing(
    context: SweepContext, cells: Mapping[str, Record | DataError], folder: Path
) -> tuple[list[Cell], set[str]]:
    """The cells that are to be done, and the names of their runs.

    Those without a record, and those whose record was damaged, with a remark. The control of a cell that is done again
    is too, as other heads may stay.
    """
    found = finished_cells(cells, folder)
    again = {cell.folder for cell in context.cells if cell.name not in found.records and not cell.control}
    missing = [cell for cell in context.cells if cell.name not in found.records or cell.folder in again]
    names = {cell.name for cell in missing}
    fate = {True: "the cell was done again", False: "left out: name its method, size and seed to do it again"}
    context.opened.remarks += [f"{why}; {fate[name in names]}" for name, why in found.damaged.items()]
    return missing, again


def cells_kept(config: SweepConfig) -> tuple[Path, int]:
    """Where the cells of a sweep are that was interrupted, and how many."""
    new = replacing_folder(config.out)
    folder = new if config.force and new.is_dir() else config.out
    return folder, len(cell_names(folder))


def do_cells(context: SweepContext, cells: Sequence[Cell], *, progress: Progress = no_progress) -> None:
    """Do cells and keep their records: scores of heads first, controls last."""
    pruned: list[Task] = [cell for cell in cells if not cell.control]
    controls: list[Task] = [cell for cell in cells if cell.control]
    with progress("sweep", len(cells)) as step, _workers(context) as do:
        for phase, count in ((context.rankings(cells), 0), (pruned, 1), (controls, 1)):
            for _ in do(phase):
                step(count)


def do_task(context: SweepContext, task: Task) -> None:
    """One cell, or the scores of one criterion unless they are kept."""
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
        yield lambda tasks: _in_pool(pool, tasks, context.opened.remarks)
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(multiprocessing.active_children()) - before:
            child.terminate()
            child.join(POLL)
        raise


def _in_pool(pool: ProcessPoolExecutor, tasks: Sequence[Task], remarks: list[str]) -> Iterator[None]:
    try:
        for future in as_completed([pool.submit(_do_in_worker, task) for task in tasks]):
            remarks += future.result()
            yield
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


def _do_in_worker(task: Task) -> list[str]:
    """Returns the remarks that came with it."""
    if not _CONTEXT:  # opened once in each process
        _CONTEXT.append(SweepContext(_CONFIG[0]))
    context = _CONTEXT[0]
    known = len(context.opened.remarks)
    do_task(context, task)
    return context.opened.remarks[known:]


def sweep_record(context: SweepContext) -> dict[str, Any]:
    """What a directory of cells is of: with it they are known, and gone on with."""
    config, opened, signature = context.config, context.opened, sweep_signature(context)
    corpora = {"source": opened.corpus, "valid": opened.valid}
    digests = {name: corpus and f"{corpus.digest}-{corpus.count}" for name, corpus in corpora.items()}
    if config.from_scratch:
        digests["recipe"] = recipe_digest(context.recipe)
    if context.labeller is not None:
        digests["labels"] = context.labeller.digest
    return {
        "headscope": VERSION,
        "signature": str(signature),
        "source": {
            "path": config.checkpoint,
            "format": context.checkpoint.format,
            "model_type": context.checkpoint.model_type,
        },
        "digests": {"checkpoint": context.checkpoint.digest, **digests},
        "options": {name: value for name, value in identity(config).items() if name not in GRID},
        "unused": config.unused,
        "settings": config.settings(),
        "heads": context.gating.heads,
        "heads_per_site": context.gating.per_site(),
        "metric": context.metric,
        "remarks": opened.remarks,
    }


def difference(folder: Path, record: Mapping[str, Any], saved: Mapping[str, Any]) -> str | None:
    """In what options, texts or checkpoint the cells of a directory differ by its `saved` record; None: in nothing."""
    options, digests = saved.get("options"), saved.get("digests")
    if not isinstance(options, dict) or not isinstance(digests, dict):
        return f"{folder / RECORD} cannot be read; choose another --out, or --force to begin anew"
    unused = {*record["unused"], *saved.get("unused", ())}
    compared = {name: value for name, value in record["options"].items() if name not in unused}
    if others := changed(compared, options):
        return (
            f"the sweep in {folder} has {flag(others[0])} {options.get(others[0])!r}, now "
            f"{record['options'][others[0]]!r}; give the same options, another --out, or --force to begin anew"
        )
    known = [name for name in record["digests"] if name in digests or name not in ("recipe", "labels")]
    if others := [name for name in known if digests.get(name) != record["digests"][name]]:
        what = {"checkpoint": "checkpoint", "source": "--source, --target or --labels"}
        what["labels"] = "run of --functions"
        what["recipe"] = "recipe (--recipe, or the run that the checkpoint lies in)"
        return (
            f"the sweep in {folder} was made with another {what.get(others[0], 'validation text')}; give the same, "
            "another --out, or --force to begin anew"
        )
    return None


def write_conclusion(context: SweepContext, record: Mapping[str, Any]) -> Sweep:
    """The tables of all cells that a directory holds, written there, also into its `record`."""
    config = context.config
    cells = read_objects(config.out / CELLS)
    found = finished_cells(cells, config.out)
    names = dict.fromkeys([*(cell.name for cell in context.cells), *found.records])  # those of earlier calls come last
    if broken := [name for name in names if name in found.damaged]:
        raise DataError(f"{found.damaged[broken[0]]}; the same command does it again")
    records = [found.records[name] for name in names if name in found.records]
    kept, sites = survivors(records, context.functions), context.gating.per_site()
    notes = [*context.remarks, *other_weights(config.functions, context.checkpoint)]
    notes += kept_remarks(records, config.out) if config.keep_models else []
    unpruned = next((np.array(record["sums"]) for record in records if record["cell"]["method"] == UNPRUNED), None)
    baseline = None if unpruned is None else context.why_no_baseline(unpruned)
    measured = MeasuredCells.of(records, context.bootstrap, margin=None if baseline else config.tolerance)
    table = make_table(measured, sites, context.functions)
    result = Sweep(context, table, kept, verdicts(measured, sites), baseline, notes)
    for name, frame in ((TABLE, table), (SURVIVORS, kept)):
        write_csv(config.out / name, frame)
    labelled = None if config.functions is None else read_record(config.functions / "run.json").get("checkpoint")
    record = {**record} | {name: result.record()[name] for name in SAID} | {"labelled": labelled}
    record["missing"] = [cell.name for cell in context.cells if cell.name not in found.records]
    write_json(config.out / RECORD, SWEEP.described(record))
    return result
