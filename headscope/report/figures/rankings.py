"""Rankings of heads against each other: ranks of heads by every two rankings, and how much they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.errors import ConfigError
from headscope.report.charts import Array, hide_frame
from headscope.report.figures.needs import importances
from headscope.report.grid import cell_inches
from headscope.report.marks import SITE_COLORS, contrast
from headscope.report.registry import PlotFigure
from headscope.report.sheet import PALE, Sheet, em, shorten, swatch, text_width
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

CELL = 7.0  # ems of a pair of rankings
DRAWS, SEED = 1000, 1
FEW = 3  # fewer are compared when that is asked for
LONGEST = 20.0  # ems of a ranking's title
CLEAR = 200  # heads whose points do not run into each other; of more they are smaller and paler
EDGE = 0.1  # share of a cell that its scatter leaves free on each side
Ranks = pd.DataFrame
"""A column per ranking, a row per head: 1 is the most important head; tied heads have their mean rank."""


@dataclass(frozen=True)
class RankingsOptions:
    """Options of the figure."""

    ranking: tuple[str, ...] = option(
        (),
        "Column of heads.csv; repeat it; default: all importances that rank heads of several layers.",
        metavar="NAME",
        repeat=True,
    )


def draw_rankings(run: Study, sheet: Sheet, options: RankingsOptions) -> None:
    """Spearman's correlation of every two rankings above the diagonal, the ranks of all heads below it.

    Rankings are columns of heads.csv that say which heads matter; `ranking` chooses some. Intervals are of heads drawn
    again with replacement (percentiles of 1,000 draws).
    """
    ranks = ranks_of(run, options.ranking)
    count, size = len(ranks.columns), float(rcParams["xtick.labelsize"])
    names = [shorten(measure_of(name).words, LONGEST * em(), size) for name in ranks.columns]
    beside = max(text_width(name, size) for name in names) / em() + 2
    (axes,) = sheet.panels([""], [(count * CELL, count * CELL)], bar=True, beside=beside, above=beside)
    shades = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    _draw_points(axes, ranks, [SITE_COLORS[site] for site in run.heads["site"]])
    sheet.later.append(lambda: _write_correlations(axes, ranks, shades))
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.set_yticks(np.arange(count) + 0.5, names, parse_math=False)
    axes.set_xticks(np.arange(count) + 0.5, names, parse_math=False, rotation=90)
    hide_frame(axes)
    sheet.scale(shades, [axes], "rank correlation")
    sheet.key(
        *(swatch(SITE_COLORS[site], site) for site in dict.fromkeys(run.heads["site"])),
        "below the diagonal: a point per head, its ranks from the most important (top right) down",
    )
    what = f"Spearman's rank correlation of {len(ranks)} heads, 95 % interval"
    sheet.headline("How much rankings of heads agree", f"{run.model} · {run.data} · {what}")


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
    chosen = list(dict.fromkeys(rankings or [measure.name for measure in importances(run) if measure.name in usable]))
    if len(chosen) < 2:
        raise MissingTable(
            f"run {run.name} has {len(chosen)} rankings of all heads, and it takes two to compare; run "
            "`headscope analyze … --importance` first"
        )
    return pd.DataFrame({name: usable[name] for name in chosen}).rank()


def correlations(ranks: Ranks) -> tuple[Array, Array, Array]:
    """Correlation of every two columns [m m], and the ends of its interval."""
    table = ranks.to_numpy(float)
    draws = np.random.default_rng(SEED).integers(len(table), size=(DRAWS, len(table)))
    drawn = np.stack([_correlate(table[rows]) for rows in draws])
    low, high = np.nanpercentile(drawn, (2.5, 97.5), axis=0)
    return _correlate(table), low, high


def _correlate(table: Array) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(np.corrcoef(table, rowvar=False))


def _draw_points(axes: Axes, ranks: Ranks, colors: Sequence[str]) -> None:
    """The ranks of all heads below the diagonal."""
    share = 1 - (ranks.to_numpy(float) - 0.5) / len(ranks)  # 1: the most important
    place = EDGE + (1 - 2 * EDGE) * share
    fewer = min(1.0, CLEAR / len(ranks))
    for row in range(len(ranks.columns)):
        for column in range(row):
            axes.add_patch(Rectangle((column, row), 1, 1, facecolor=PALE, edgecolor="white"))
            xs, ys = column + place[:, column], row + 1 - place[:, row]
            axes.scatter(xs, ys, s=1.6 * fewer, c=colors, linewidths=0, alpha=0.3 + 0.5 * fewer)


def _write_correlations(axes: Axes, ranks: Ranks, shades: ScalarMappable) -> None:
    """The correlations above the diagonal, with their intervals where these fit."""
    value, low, high = correlations(ranks)
    size = float(rcParams["xtick.labelsize"])
    wide, tall = cell_inches(axes)
    fits = bool(wide > text_width("−0.00 to", size) and tall > 4 * size / 72)
    for row, column in zip(*np.triu_indices(len(value), 1), strict=True):
        color = shades.to_rgba(value[row, column])
        axes.add_patch(Rectangle((int(column), int(row)), 1, 1, facecolor=color, edgecolor="white"))
        text = f"{value[row, column]:.2f}" + f"\n{low[row, column]:.2f} to\n{high[row, column]:.2f}" * fits
        place = column + 0.5, row + 0.5
        axes.text(*place, text.replace("-", "−"), size=size, color=contrast(color), ha="center", va="center")


def are_many(run: Study) -> bool:
    """Whether there is much to compare."""
    return len(ranks_of(run).columns) >= FEW


RANKINGS = PlotFigure(
    "rankings",
    "Rankings of heads against each other: how much they agree, with intervals, and the ranks of all heads.",
    draw_rankings,
    Options=RankingsOptions,
    every_run=are_many,
    order=200,
)
