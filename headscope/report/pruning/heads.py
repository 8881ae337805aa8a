"""What every panel of a pruning figure is; how open gates are while they learn; where the heads that stay are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from headscope.report.layout.legend import SITE_COLORS as SITES
from headscope.report.layout.legend import Entry
from headscope.report.layout.page import INK, Swatch
from headscope.report.readers.pruning_runs import UNPRUNED, PruningRun
from headscope.results.study_tables import RunError


@dataclass(frozen=True)
class PruningPanel:
    """Axes of one kind: the title, what draws into them, and what stands beside the axes with which unit.

    Panels with the same `ylabel` have the same limits.
    """

    title: str
    draw: Callable[[Axes], None]
    xlabel: str
    ylabel: str


Made = tuple[list[PruningPanel], list[Entry]]


def by_method(runs: Sequence[PruningRun]) -> list[tuple[PruningRun, str, pd.DataFrame]]:
    """Cells by run and method, without controls, which have the heads of the cells they control."""
    groups = []
    for run in runs:
        plain = run.cells[(run.cells["control"] == "") & (run.cells["method"] != UNPRUNED)]
        groups += [(run, str(method), cells) for method, cells in plain.groupby("method", sort=False)]
    return groups


def named(runs: Sequence[PruningRun], run: PruningRun, method: str) -> str:
    """The method, with the run's name where there are several."""
    return method if len(runs) == 1 else f"{run.name}: {method}"


MOST = 12  # trajectories in one figure


def gates(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """How open every gate is while gates learn; of a sweep the first seed of each size."""
    panels: list[PruningPanel] = []
    sites: dict[str, None] = {}
    hidden = 0
    for run in runs:
        gated = run.cells[run.cells["cell"].isin(set(run.gates)) & (run.cells["control"] == "")]
        for (method, size), cells in gated.groupby(["method", "size"], sort=False):
            if len(panels) == MOST:
                hidden += 1
                continue
            name = str(cells["cell"].iloc[0])
            table = run.trajectory(name)
            sites |= dict.fromkeys(table["site"])
            title = named(runs, run, f"{method}, {size}")
            panels.append(PruningPanel(title, _gates_panel(table), "update", "probability of being open"))
    if not panels:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    entries: list[Entry] = [(Swatch(width=1.8), SITES[site], f"{site}, mean") for site in SITES if site in sites]
    entries += [(Swatch(width=0.5), INK, "a head")]
    return panels, [*entries, *([("", "", f"{hidden} more sizes are not shown")] if hidden else [])]


def _gates_panel(table: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        wide = table.pivot(index="update", columns=["site", "layer", "head"], values="open")
        for site in [site for site in SITES if site in set(table["site"])]:
            gates = wide[[site]]
            axes.plot(gates.index, gates, color=SITES[site], lw=0.5, alpha=0.45)
            axes.plot(gates.index, gates.mean(axis=1), color=SITES[site], lw=1.8)
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw


def sites(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """Heads that stay at each site against all that are pruned, a panel a method (Voita et al. 2019, figure 9)."""
    panels = []
    for run, method, cells in by_method(runs):
        unpruned = run.cells[run.cells["method"] == UNPRUNED]
        draw = _sites_panel(run, pd.concat([unpruned, cells]))
        panels.append(PruningPanel(named(runs, run, method), draw, "heads pruned in all", "heads kept"))
    if not panels:
        raise RunError("there is no pruned model in these runs yet")
    sites = [site for site in SITES if any(site in run.sites for run in runs)]
    entries: list[Entry] = [(Swatch(mark="o"), SITES[site], site) for site in sites]
    return panels, [*entries, *_seeds(runs)]


def _sites_panel(run: PruningRun, cells: pd.DataFrame) -> Callable[[Axes], None]:
    columns = {f"kept_{site}": SITES[site] for site in run.sites}
    return _courses(cells.assign(pruned=cells["of"] - cells["kept"]), columns, most=int(cells["of"].max()))


GROUPS = 3
"""Courses of one panel: layers are put together where there are more."""
SHADES = ("#0072b2", "#e69f00", "#009e73")


def layers(runs: Sequence[PruningRun]) -> Made:
    """Heads that stay in the layers of each site, against all that are pruned there (Voita et al. 2019, figure 10).

    A panel a method and site. Layers are in three groups at most, as many layers each as can be, from the lowest up;
    the paper's are pairs of six layers.
    """
    panels, groups = [], []
    for run, method, cells in by_method(runs):
        unpruned = run.cells[run.cells["method"] == UNPRUNED]
        if unpruned.empty:
            raise RunError(f"{run.name} does not have the unpruned model, whose layers are divided, yet; finish it")
        for site in run.sites:
            table, names = _by_layers(run, pd.concat([unpruned, cells]), site)
            groups.append(names)
            draw = _courses(table, dict(zip(names, SHADES, strict=False)), most=int(unpruned[f"kept_{site}"].max()))
            title = ", ".join([*([named(runs, run, method)] if len(by_method(runs)) > 1 else []), site])
            panels.append(PruningPanel(title, draw, "heads of the site pruned", "heads kept"))
    if not panels:
        raise RunError("there is no pruned model in these runs yet")
    entries: list[Entry] = []
    for number, shade in enumerate(SHADES):
        words = dict.fromkeys(names[number] for names in groups if number < len(names))
        entries += [(Swatch(mark="o"), shade, " or ".join(words))] if words else []
    return panels, [*entries, *_seeds(runs)]


def _by_layers(run: PruningRun, cells: pd.DataFrame, site: str) -> tuple[pd.DataFrame, list[str]]:
    """The cells with the number of heads that are pruned of a site, and a column for each group of its layers."""
    heads = run.survivors[run.survivors["site"] == site]
    whole = heads[heads["cell"].isin(run.cells.loc[run.cells["method"] == UNPRUNED, "cell"])]
    numbers = sorted(whole["layer"].unique())
    parts = [part.tolist() for part in np.array_split(np.array(numbers), min(GROUPS, len(numbers)))]
    names = [f"layer {part[0]}" if len(part) == 1 else f"layers {part[0]} to {part[-1]}" for part in parts]
    counts = {
        name: cells["cell"].map(heads[heads["layer"].isin(part)].groupby("cell").size()).fillna(0)
        for name, part in zip(names, parts, strict=True)
    }
    return cells.assign(pruned=len(whole) - cells[f"kept_{site}"], **counts), names


def _seeds(runs: Sequence[PruningRun]) -> list[Entry]:
    if any(run.cells.duplicated(["method", "control", "size"]).any() for run in runs):
        return [("", "", "mean over seeds; band: lowest to highest")]
    return []


def _courses(cells: pd.DataFrame, columns: Mapping[str, str], *, most: int) -> Callable[[Axes], None]:
    """Columns of the cells, each in its colour, against those `pruned` of at `most` so many: means of sizes, bands."""

    def draw(axes: Axes) -> None:
        for column, color in columns.items():
            by_size = cells.groupby("size", sort=False).agg(
                pruned=("pruned", "mean"), mean=(column, "mean"), low=(column, "min"), high=(column, "max")
            )  # fmt: skip
            by_size = by_size.sort_values("pruned")
            axes.plot(by_size["pruned"], by_size["mean"], color=color, lw=1.2, marker="o", ms=3)
            if len(cells) > len(by_size):
                axes.fill_between(by_size["pruned"], by_size["low"], by_size["high"], color=color, alpha=0.15, lw=0)
        axes.set_xlim(-0.02 * most, 1.02 * most)
        axes.update_datalim([(0, 0)])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw
