"""Which size: the one that is asked for, or the smallest of a fixed sequence that is still as good.

Sizes are cells of a sweep by one ranking, kept in files as those of `headscope prune sweep` are. They are measured from
the largest down and no further than the first that is not established to be as good: in this order no verdict needs a
correction for the others (`headscope.evaluation.non_inferiority`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np

from headscope.errors import ConfigError
from headscope.evaluation.non_inferiority import OPEN, NonInferiority, established, why_open
from headscope.heads import HeadId
from headscope.progress import Progress, no_progress
from headscope.pruning.shrink.opened import Opened
from headscope.pruning.sweep.cell_files import Record, finished_cells, write_cell
from headscope.pruning.sweep.cells import SweepContext, ranked_out, run_cell
from headscope.pruning.sweep.config import UNPRUNED, Cell
from headscope.pruning.sweep.table import MeasuredCells


def rank(context: SweepContext, *, progress: Progress = no_progress) -> None:
    """Score the heads and allocate, unless the scores are kept from before."""
    ((method, seed),) = context.rankings(context.cells)
    with progress("ranking heads", len(context.gating.units)) as step:
        context.scores(method, seed, step=step)


def chosen_heads(opened: Opened, *, progress: Progress = no_progress) -> list[HeadId]:
    """The heads that go: so many as is asked for, else of the size that is searched for.

    Sizes that were measured before are read. ConfigError where the unpruned model is no baseline, or no size is as
    good.
    """
    context, tried = opened.sizes, list[Record]()
    unpruned, *sized = sorted(context.cells, key=lambda cell: -math.inf if cell.keep is None else -cell.keep)
    if not opened.config.searches:
        return ranked_out(context, sized[0])
    kept = finished_cells(context.config.out, context.gating, context.metric).records
    sized = [cell for cell in sized if cell.keep != context.gating.heads]
    with progress("measuring sizes", 1 + len(sized)) as step:
        baseline = _measured(context, unpruned, kept)
        step(1)

        def verdicts() -> Iterator[NonInferiority]:
            for cell in sized:
                tried.append(_measured(context, cell, kept))
                step(1)
                if verdict := verdict_on(context, baseline, tried[-1]):
                    yield verdict

        passed = len(list(established(verdicts())))
    if not passed:
        raise ConfigError(_none_is_as_good(opened, baseline, tried[0]))
    stays = set(tried[passed - 1]["kept"])
    return [head for head in context.gating.without([]) if str(head) not in stays]


def verdict_on(context: SweepContext, baseline: Record, record: Record) -> NonInferiority | None:
    """Whether the model of a cell is as good as the unpruned one; None where that is no baseline."""
    return MeasuredCells.of([baseline, record], context.config, margin=context.config.tolerance).verdict([1])


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


def _none_is_as_good(opened: Opened, baseline: Record, largest: Record) -> str:
    """What to do where not even the largest size passes."""
    context, sentences = opened.sizes, opened.asked.corpus.count
    found = verdict_on(context, baseline, largest)
    assert found is not None, "the baseline was checked"
    limits = {"worse_limit": found.worse_limit, "margin": found.margin, "detectable": found.detectable}
    why = f"; {why_open(**limits, text=f'{sentences} sentences')}" if found.verdict == OPEN else ""
    return (
        f"not even with {len(largest['kept'])} of {context.gating.heads} heads the loss of {context.metric_title} is "
        f"established to be within {opened.config.margin}: {found.worse:.3g}, at most {found.worse_limit:.3g} (95 %)"
        f"{why}; give more text to judge on (--valid-source), a wider --max-drop, or --keep N"
    )
