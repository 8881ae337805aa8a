"""Rankings of heads against each other: ranks of heads by every two rankings, and how much they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.report.layout.legend import SITE_COLORS, Entry, Legend, contrast
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import BAR, LABEL, PALE, TICK, Page, shorten, text_width
from headscope.report.registry import PlotFigure
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

CELL, SMALLEST = 0.62, 0.42  # inches of a pair of rankings; below the smaller one intervals do not fit
DRAWS, SEED = 1000, 1
FEW = 3  # fewer are compared when that is asked for
LONGEST = 2.0  # inches of a ranking's title
CLEAR = 200  # heads whose points do not run into each other; of more they are smaller and paler
EDGE = 0.1  # share of a cell that its scatter leaves free on each side
Ranks = pd.DataFrame
"""A column per ranking, a row per head: 1 is the most important head; tied heads have their mean rank."""


@dataclass(frozen=True)
class RankingsOptions:
    """Options of the figure."""

    ranking: tuple[str, ...] = option(
        (),
        "Column of heads.csv; repeat it; default: all that rank heads of several layers.",
        metavar="NAME",
        repeat=True,
    )


def rankings_figure(run: Study, ranking: Sequence[str] = ()) -> Figure:
    """Spearman's correlation of every two rankings above the diagonal, the ranks of all heads below it.

    Rankings are columns of heads.csv that say which heads matter; `ranking` chooses some. Intervals are of heads drawn
    again with replacement (percentiles of 1,000 draws).
    """
    ranks = ranks_of(run, ranking)
    names = _titles(ranks)
    left = max(text_width(name, LABEL) for name in names) + 0.12
    bar = BAR if cell_pitch(CELL, len(names), besides=left + BAR) == CELL else 0.0  # the numbers are written, too
    cell = cell_pitch(CELL, len(names), besides=left + bar, least=0.3)
    side = cell * len(names)
    below = left  # names stand upright
    sites = list(dict.fromkeys(run.heads["site"]))
    entries: list[Entry] = [("    ", SITE_COLORS[site], site) for site in sites]
    entries.append(("", "", "below the diagonal: a point per head, its ranks from the most important (top right) down"))
    legend = Legend.plan(entries, widest(max(left + side + bar, 4.6)))
    interval = ", 95 % interval" if cell >= SMALLEST else ""
    page = Page(
        left + side + bar,
        side + below + legend.height,
        title="How much rankings of heads agree",
        subtitle=f"{run.model} · {run.data} · Spearman's rank correlation of {len(ranks)} heads{interval}",
        footer=run.signature,
    )
    norm = Normalize(-1, 1)
    shades = ScalarMappable(norm, "RdBu_r")
    axes = page.axes(left, 0, side, side)
    colors = [SITE_COLORS[site] for site in run.heads["site"]]
    _draw(axes, ranks, shades, colors, cell)
    if bar:
        page.color_bar(left + side + 0.1, 0, min(side, 2.0), shades, label="rank correlation", unit="ρ")
    legend.draw(page, side + below)
    return page.finished()


def ranks_of(run: Study, rankings: Sequence[str] = ()) -> Ranks:
    """The ranks of heads by each ranking that the run has; MissingTable where these are fewer than two.

    ConfigError for a name that is no ranking of the run. A column without a number for some head is none, nor is one
    with the same number for all.
    """
    signs = {name: {"highest": -1.0, "lowest": 1.0}.get(measure_of(name).keep) for name in run.measures}
    values = {name: run.heads[name].to_numpy(float) * sign for name, sign in signs.items() if sign is not None}
    usable = {name: column for name, column in values.items() if np.isfinite(column).all() and np.ptp(column) > 0}
    for name in rankings:
        if run.require(name) not in usable:
            raise ConfigError(f"run {run.name}: {name} is no ranking of all heads; choose from {', '.join(usable)}")
    chosen = list(dict.fromkeys(rankings or [name for name in usable if measure_of(name).orders]))
    if len(chosen) < 2:
        raise MissingTable(
            f"run {run.name} has {len(chosen)} rankings of all heads, and it takes two to compare; run "
            "`headscope analyze … --importance` first"
        )
    return pd.DataFrame({name: usable[name] for name in chosen}).rank()


def correlations(ranks: Ranks) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Correlation of every two columns [m m], and the ends of its interval."""
    table = ranks.to_numpy(float)
    draws = np.random.default_rng(SEED).integers(len(table), size=(DRAWS, len(table)))
    drawn = np.stack([_correlate(table[rows]) for rows in draws])
    low, high = np.nanpercentile(drawn, (2.5, 97.5), axis=0)
    return _correlate(table), low, high


def _correlate(table: NDArray[np.float64]) -> NDArray[np.float64]:
    centred = table - table.mean(axis=0)
    norms = np.sqrt((centred**2).sum(axis=0))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(centred.T @ centred / np.outer(norms, norms))


def _draw(axes: Axes, ranks: Ranks, shades: ScalarMappable, colors: Sequence[str], cell: float) -> None:
    names, count = _titles(ranks), len(ranks.columns)
    value, low, high = correlations(ranks)
    share = 1 - (ranks.to_numpy(float) - 0.5) / len(ranks)  # 1: the most important
    place = EDGE + (1 - 2 * EDGE) * share
    fewer = min(1.0, CLEAR / len(ranks))
    for row in range(count):
        for column in range(count):
            if row == column:
                continue
            if row < column:
                color = shades.to_rgba(value[row, column])
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=color, edgecolor="white", linewidth=0.8))
                text = f"{value[row, column]:.2f}"
                if cell >= SMALLEST:
                    text += f"\n{low[row, column]:.2f} to\n{high[row, column]:.2f}"
                text = text.replace("-", "−")
                axes.text(column + 0.5, row + 0.5, text, size=TICK, color=contrast(color), ha="center", va="center")
            else:
                axes.add_patch(Rectangle((column, row), 1, 1, facecolor=PALE, edgecolor="white", linewidth=0.8))
                xs, ys = column + place[:, column], row + 1 - place[:, row]
                axes.scatter(xs, ys, s=1.6 * fewer, c=colors, linewidths=0, alpha=0.3 + 0.5 * fewer)
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.set_yticks(np.arange(count) + 0.5, names, parse_math=False)
    axes.set_xticks(np.arange(count) + 0.5, names, parse_math=False, rotation=90)
    axes.tick_params(labelsize=LABEL)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _titles(ranks: Ranks) -> list[str]:
    return [shorten(measure_of(name).words, LONGEST, LABEL) for name in ranks.columns]


def are_many(run: Study) -> bool:
    """Whether there is much to compare."""
    return len(ranks_of(run).columns) >= FEW


RANKINGS = PlotFigure(
    "rankings",
    "Rankings of heads against each other: how much they agree, with intervals, and the ranks of all heads.",
    rankings_figure,
    Options=RankingsOptions,
    every_run=are_many,
    order=200,
)
