"""Which functions survive: a bar a size, a part a function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from headscope.engine.declarations import head_functions
from headscope.report.layout.families import functions_of
from headscope.report.layout.legend import Entry
from headscope.report.pruning.panel import Made, PruningPanel, by_method, named
from headscope.report.readers.pruning_runs import RELABELLED, UNPRUNED, PruningRun
from headscope.report.readers.run import RunError

SEVERAL, NONE = "several functions", "no function found"
SEVERAL_COLOR = "#555555"
KINDS = {"functions": "before", RELABELLED: "after"}
"""Columns of the survivors with functions: those that heads had, and those that they have."""
TICK_ROOM = 0.26  # inches that the number below a bar takes


def functions_kept(runs: Sequence[PruningRun]) -> Made:
    """Which functions survive: a bar a size, a part a function (Voita et al. 2019, figure 8).

    A panel a method; where a sweep looked at the functions anew (`--relabel`), a second one of those.
    """
    labelled = [run for run in runs if "functions" in run.survivors]
    if not labelled:
        raise RunError("functions of these heads are not known; give --functions RUN, a run of `headscope analyze`")
    panels = []
    colors: dict[str, str] = {}
    for run, method, cells in by_method(labelled):
        if run.labelled and not cells["cell"].isin(run.survivors["cell"]).any():
            continue
        for column, kind in KINDS.items():
            if column not in run.survivors:
                continue
            counts = function_counts(run, cells, column)
            colors |= {name: _color(name) for name in counts.columns if counts[name].any()}
            title = named(labelled, run, method) + (f", {kind}" if RELABELLED in run.survivors else "")
            panels.append(PruningPanel(title, _functions_panel(counts), "heads kept", "heads"))
    if not panels:
        raise RunError("--functions RUN has labels of other heads than any of these models; name a run on one of them")
    order = [*head_functions(), *sorted(set(colors) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    entries: list[Entry] = [("    ", colors[name], name) for name in order if name in colors]
    whose = ", ".join(dict.fromkeys(run.labelled or "the unpruned model" for run in labelled))
    if any(RELABELLED in run.survivors for run in labelled):
        entries.append(("", "", f"before: functions in {whose}; after: in the pruned model itself; mean over seeds"))
    else:
        entries.append(("", "", f"functions are those of {whose}; mean over seeds"))
    return panels, entries


def function_counts(run: PruningRun, pruned: pd.DataFrame, column: str = "functions") -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller.

    `column` of the survivors has the functions.
    """
    kinds = run.survivors.assign(kind=[run_kind(labels) for labels in run.survivors[column]])
    unpruned = run.cells[run.cells["method"] == UNPRUNED]
    if run.labelled:  # of one pruned model: nothing is known of other heads
        unpruned, pruned = (cells[cells["cell"].isin(kinds["cell"])] for cells in (unpruned, pruned))
    rows = {}
    for _, cells in [*unpruned.groupby("size", sort=False), *pruned.groupby("size", sort=False)]:
        survivors = kinds[kinds["cell"].isin(cells["cell"])]
        heads, size = float(cells["kept"].mean()), str(cells["size"].iloc[0])
        rows[(heads, size)] = survivors["kind"].value_counts() / len(cells)
    order = sorted(rows, key=lambda row: -row[0])
    table = pd.DataFrame([rows[row] for row in order], index=pd.Index([heads for heads, _ in order])).fillna(0.0)
    names = [*head_functions(), *sorted(set(table.columns) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    return table[[name for name in names if name in table]]


def run_kind(labels: object) -> str:
    """The one kind of function that a head has, or that it has several or none."""
    families = list(dict.fromkeys(function.family.name for function in functions_of(labels)))
    return families[0] if len(families) == 1 else SEVERAL if families else NONE


def _color(name: str) -> str:
    if known := head_functions().get(name):
        return known.color
    return {SEVERAL: SEVERAL_COLOR, NONE: "#d9d9d9"}.get(name, "#999999")


def _functions_panel(counts: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        positions = list(range(len(counts)))
        bottom = pd.Series(0.0, index=range(len(counts)))
        for name in counts:
            heights = counts[name].reset_index(drop=True)
            axes.bar(
                positions, heights, bottom=bottom, width=0.8, color=_color(str(name)), edgecolor="white", linewidth=0.4
            )
            bottom = bottom + heights
        labels = [f"{heads:.3g}" for heads in counts.index]
        room = axes.get_window_extent().width / axes.figure.dpi
        step = max(1, -(-len(labels) // max(int(room / TICK_ROOM), 1)))
        axes.set_xticks(positions[::step], labels[::step])
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False, axis="x")

    return draw
