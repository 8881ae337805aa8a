"""Which heads stay when others go: at which site, in which layers, with which functions; and gates while they learn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from headscope.config.declarations import head_functions
from headscope.report.charts import draw_bars, draw_course
from headscope.report.marks import SITE_COLORS, functions_of
from headscope.report.sheet import INK, Sheet, stroke
from headscope.results.study_tables import RunError
from headscope.results.sweep import RELABELLED, UNPRUNED, Sweep

MOST = 12  # trajectories in one figure
GROUPS = 3
"""Courses of one panel: layers are put together where there are more."""
SHADES = ("#0072b2", "#e69f00", "#009e73")
SEVERAL, NONE = "several functions", "no function found"
COLORS = {SEVERAL: "#555555", NONE: "#d9d9d9"}
KINDS = {"functions": "before", RELABELLED: "after"}
"""Columns of the survivors with functions: those that heads had, and those that they have."""
SEEDS = "mean over seeds; band: lowest to highest"


@dataclass(frozen=True)
class PruningPanel:
    """A panel of a pruning figure; those with the same `ylabel` have the same limits."""

    title: str
    draw: Callable[[Axes], None]
    xlabel: str
    ylabel: str
    whole: tuple[bool, bool] = (True, False)
    """Whether the axes count something."""


def by_method(runs: Sequence[Sweep]) -> list[tuple[Sweep, str, pd.DataFrame]]:
    """Run, title and cells of each method, without controls, which have the heads of the cells they control."""
    groups = []
    for run in runs:
        plain = run.cells[(run.cells["control"] == "") & (run.cells["method"] != UNPRUNED)]
        for method, cells in plain.groupby("method", sort=False):
            groups.append((run, str(method) if len(runs) == 1 else f"{run.name}: {method}", cells))
    return groups


def has_seeds(runs: Sequence[Sweep]) -> bool:
    """Whether some size was tried more than once."""
    return any(run.cells.duplicated(["method", "control", "size"]).any() for run in runs)


def draw_sizes(axes: Axes, cells: pd.DataFrame, x: str, column: str, color: str, **look: Any) -> None:
    """A column of cells against `x`: means of sizes, with a band from the lowest to the highest of their seeds."""
    named = {"x": (x, "mean"), "mean": (column, "mean"), "low": (column, "min"), "high": (column, "max")}
    sizes = cells.groupby("size", sort=False).agg(**named).sort_values("x")
    low, high = (sizes["low"], sizes["high"]) if len(cells) > len(sizes) else (None, None)
    draw_course(axes, sizes["x"], sizes["mean"], color, low=low, high=high, **look)


def draw_gates(runs: Sequence[Sweep], sheet: Sheet) -> list[PruningPanel]:
    """How open every gate is while gates learn; of a sweep the first seed of each size."""
    panels = []
    for run, title, cells in by_method(runs):
        for size, gated in cells[cells["cell"].isin(set(run.gates))].groupby("size", sort=False):
            draw = partial(_plot_gates, run, str(gated["cell"].iloc[0]))
            panels.append(PruningPanel(f"{title}, {size}", draw, "update", "probability of being open"))
    if not panels:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    sheet.key(stroke(INK, "a head", linewidth=0.5))
    if len(panels) > MOST:
        sheet.key(f"{len(panels) - MOST} more sizes are not shown")
    return panels[:MOST]


def _plot_gates(run: Sweep, cell: str, axes: Axes) -> None:
    table = run.trajectory(cell)
    wide = table.pivot(index="update", columns=["site", "layer", "head"], values="open")
    for site in [site for site in SITE_COLORS if site in set(table["site"])]:
        gates, color = wide[[site]], SITE_COLORS[site]
        axes.plot(gates.index, gates, color=color, linewidth=0.5, alpha=0.45)
        axes.plot(gates.index, gates.mean(axis=1), color=color, linewidth=1.8, label=f"{site}, mean")
    axes.set_ylim(-0.03, 1.03)


def draw_sites(runs: Sequence[Sweep], sheet: Sheet) -> list[PruningPanel]:
    """Heads that stay at each site against all that are pruned, a panel a method (Voita et al. 2019, figure 9)."""
    panels = []
    for run, title, cells in by_method(runs):
        table = pd.concat([run.unpruned, cells])
        table = table.assign(pruned=table["of"] - table["kept"]).rename(columns=lambda name: name.removeprefix("kept_"))
        draw = partial(_plot_courses, table, {site: SITE_COLORS[site] for site in run.sites}, int(table["of"].max()))
        panels.append(PruningPanel(title, draw, "heads pruned in all", "heads kept", (True, True)))
    sheet.key(*([SEEDS] if has_seeds(runs) else []))
    return panels


def draw_layers(runs: Sequence[Sweep], sheet: Sheet) -> list[PruningPanel]:
    """Heads that stay in the layers of each site, against all that are pruned there (Voita et al. 2019, figure 10).

    A panel a method and site. Layers are in three groups at most, as many layers each as can be, from the lowest up;
    the paper's are pairs of six layers.
    """
    panels, groups = [], by_method(runs)
    for run, title, cells in groups:
        if run.unpruned.empty:
            raise RunError(f"{run.name} does not have the unpruned model, whose layers are divided, yet; finish it")
        for site in run.sites:
            table, names = _by_layers(run, pd.concat([run.unpruned, cells]), site)
            limit = int(run.unpruned[f"kept_{site}"].max())
            draw = partial(_plot_courses, table, dict(zip(names, SHADES, strict=False)), limit)
            own = f"{title}, {site}" if len(groups) > 1 else site
            panels.append(PruningPanel(own, draw, "heads of the site pruned", "heads kept", (True, True)))
    sheet.key(*([SEEDS] if has_seeds(runs) else []))
    return panels


def _by_layers(run: Sweep, cells: pd.DataFrame, site: str) -> tuple[pd.DataFrame, list[str]]:
    """The cells with the number of heads that are pruned of a site, and a column for each group of its layers."""
    heads = run.survivors[run.survivors["site"] == site]
    whole = heads[heads["cell"].isin(run.unpruned["cell"])]
    numbers = sorted(whole["layer"].unique())
    parts = [part.tolist() for part in np.array_split(np.array(numbers), min(GROUPS, len(numbers)))]
    names = [f"layer {part[0]}" if len(part) == 1 else f"layers {part[0]} to {part[-1]}" for part in parts]
    counts = {
        name: cells["cell"].map(heads[heads["layer"].isin(part)].groupby("cell").size()).fillna(0)
        for name, part in zip(names, parts, strict=True)
    }
    return cells.assign(pruned=len(whole) - cells[f"kept_{site}"], **counts), names


def _plot_courses(cells: pd.DataFrame, columns: Mapping[str, str], limit: int, axes: Axes) -> None:
    """Columns of the cells, each in its colour, against those `pruned`, up to `limit`."""
    for column, color in columns.items():
        draw_sizes(axes, cells, "pruned", column, color, label=column, marker="o")
    axes.set_xlim(-0.02 * limit, 1.02 * limit)
    axes.update_datalim([(0, 0)])


def draw_kept_functions(runs: Sequence[Sweep], sheet: Sheet) -> list[PruningPanel]:
    """Which functions survive: a bar a size, a part a function (Voita et al. 2019, figure 8).

    A panel a method; where a sweep looked at the functions anew (`--relabel`), a second one of those.
    """
    labelled = [run for run in runs if "functions" in run.survivors]
    if not labelled:
        raise RunError("functions of these heads are not known; give --functions RUN, a run of `headscope analyze`")
    anew = any(RELABELLED in run.survivors for run in labelled)
    panels, groups = [], by_method(labelled)
    for run, title, cells in groups:
        if run.labelled and not cells["cell"].isin(run.survivors["cell"]).any():
            continue
        for column, kind in KINDS.items():
            if column in run.survivors:
                own = title + (f", {kind}" if RELABELLED in run.survivors else "")
                draw = partial(_stack_functions, function_counts(run, cells, column))
                panels.append(PruningPanel(own, draw, "heads kept", "heads", (False, True)))
    if groups and not panels:
        raise RunError("--functions RUN has labels of other heads than any of these models; name a run on one of them")
    whose = ", ".join(dict.fromkeys(run.labelled or "the unpruned model" for run in labelled))
    after = "; after: in the pruned model itself" * anew
    sheet.key(f"{'before: functions in' if anew else 'functions are those of'} {whose}{after}; mean over seeds")
    return panels


def function_counts(run: Sweep, pruned: pd.DataFrame, column: str = "functions") -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller.

    `column` of the survivors has the functions.
    """
    kinds = run.survivors.assign(kind=run.survivors[column].map(kind_of))
    cells = pd.concat([run.unpruned, pruned])
    if run.labelled:  # of one pruned model: nothing is known of other heads
        cells = cells[cells["cell"].isin(kinds["cell"])]
    sizes = cells.groupby("size", sort=False).agg(heads=("kept", "mean"), cells=("cell", "size"))
    own = kinds.drop(columns="size").merge(cells[["cell", "size"]], on="cell")
    table = own.groupby(["size", "kind"]).size().unstack(fill_value=0).reindex(sizes.index)
    table = table.div(sizes["cells"], axis=0).set_index(pd.Index(sizes["heads"]))
    table = table.sort_index(ascending=False, kind="stable")
    known = [*head_functions(), *sorted(set(table.columns) - {*head_functions(), *COLORS}), *COLORS]
    return table[[name for name in known if name in table]]


def kind_of(labels: object) -> str:
    """The one kind of function that a head has, or that it has several or none."""
    families = list(dict.fromkeys(function.family.name for function in functions_of(labels)))
    return families[0] if len(families) == 1 else SEVERAL if families else NONE


def _stack_functions(counts: pd.DataFrame, axes: Axes) -> None:
    known = {name: family.color for name, family in head_functions().items()} | COLORS
    parts = {str(name): (known.get(str(name), "#999999"), counts[name].to_numpy()) for name in counts}
    draw_bars(axes, range(len(counts)), parts)
    step = -(-len(counts) // 12)
    axes.set_xticks(range(0, len(counts), step), [f"{heads:.3g}" for heads in counts.index[::step]])
    axes.grid(visible=False, axis="x")
