"""Which size: the one that is asked for, or the smallest of a fixed sequence that is still as good.

Sizes are cells of a sweep by one ranking, kept in files as those of `headscope prune sweep` are. They are measured from
the largest down and no further than the first that is not established to be as good: in this order no verdict needs a
correction for the others (`headscope.evaluation.non_inferiority`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headscope.errors import ConfigError
from headscope.evaluation.non_inferiority import NON_INFERIOR
from headscope.progress import Progress, no_progress
from headscope.pruning.shrink.opened import Opened
from headscope.pruning.sweep.cell_files import Record, finished_cells, write_cell
from headscope.pruning.sweep.cells import SweepContext, run_cell
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.table import Measured


def rank(context: SweepContext, *, progress: Progress = no_progress) -> None:
    """Score the heads and allocate, unless the scores are kept from before."""
    ((method, seed),) = context.rankings(context.cells)
    with progress("ranking heads", len(context.gating.units)) as step:
        context.scores(method, seed, step=step)


def chosen_size(opened: Opened, *, progress: Progress = no_progress) -> Record:
    """The record of the cell whose heads stay; sizes that were measured before are read.

    ConfigError where the unpruned model is no baseline, or no size is as good.
    """
    context, searches = opened.sizes, opened.config.searches
    kept = finished_cells(context.config.out, context.gating, context.metric).records
    unpruned, *sized = sorted(context.cells, key=lambda cell: -math.inf if cell.keep is None else -cell.keep)
    with progress("measuring sizes", len(context.cells)) as step:
        baseline, chosen, verdict = _measured(context, unpruned, kept), None, {}
        step(1)
        for cell in sized:
            record = _measured(context, cell, kept)
            step(1)
            verdict = verdict_on(context, baseline, record)
            if searches and verdict["verdict"] != NON_INFERIOR:
                break
            chosen = record
    if chosen is None:
        raise ConfigError(_none_is_as_good(opened, len(record["kept"]), verdict))
    return chosen


def verdict_on(context: SweepContext, baseline: Record, record: Record) -> dict[str, Any]:
    """The columns of a `NonInferiority` of a cell."""
    measured = Measured.of([baseline, record], context.config, margin=context.config.tolerance)
    return measured.verdict([1])


def _measured(context: SweepContext, cell: Cell, kept: Mapping[str, Record]) -> Record:
    """The record of a cell, measured now unless it is kept."""
    try:
        if cell.method == UNPRUNED and cell.name in kept:
            context.check_baseline(np.array(kept[cell.name]["sums"]))
        record = kept.get(cell.name) or run_cell(context, cell)
    except ConfigError as error:
        raise ConfigError(str(error).replace("--margin", "--max-drop")) from None
    if cell.name not in kept:
        write_cell(context.config.out, cell, record)
    return record


def _none_is_as_good(opened: Opened, largest: int, verdict: dict[str, Any]) -> str:
    """What to do where not even the largest size passes."""
    title, sentences = opened.sizes.metric_title, opened.asked.corpus.count
    return (
        f"not even with {largest} of {opened.sizes.gating.heads} heads the loss of {title} is established to be within "
        f"{opened.config.margin}: {verdict['worse']:.3g}, at most {verdict['worse_limit']:.3g} (95 %), on {sentences} "
        "sentences; give more text to judge on (--valid-source), a wider --max-drop, or --keep N"
    )
