"""Rankings of heads: how much they agree, what functions predict of them, and which deserves belief."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import PercentFormatter

from headscope.config import option
from headscope.config.declarations import Measure, measure_of, measured_columns
from headscope.engine.evidence.need import need_over_models
from headscope.errors import ConfigError, flag
from headscope.report import charts
from headscope.report.charts import Array, draw_curve, draw_intervals, frame_chart
from headscope.report.marks import SITE_COLORS, color_of, contrast, method_style
from headscope.report.registry import RUNS, PlotFigure
from headscope.report.sheet import ABOVE, GREY, INK, PALE, Sheet, em, shorten, stroke, swatch, text_width
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

CELL = 7.0  # ems of a pair of rankings
DRAWS, SEED = 1000, 1
LONGEST = 20.0  # ems of a ranking's title
MANY_HEADS = 200  # points of more heads are smaller and paler
EDGE = 0.1  # share of a cell that its scatter leaves free on each side
ROW = 2.0  # ems of a function
ORDERS = {"most important first": "-", "least important first": "--"}
DEVIATIONS = 2  # standard deviations of random orders that grey shows
LIGHT = "#d9d9d9"  # the grey of random choices, as a band
METRICS = {
    "loss": "rise of the loss (nats per token)",
    "accuracy": "fall of the accuracy",
    "bleu": "fall of BLEU",
    "representation": "cosine distance to the intact vector",
    "top1": "fall of the largest logit",
    "log-probability": "fall of log p (nats)",
}


@dataclass(frozen=True)
class RankingsOptions:
    """Options of the figure."""

    ranking: tuple[str, ...] = option(
        (), "Column of heads.csv; repeat it; default: all importances of several layers.", metavar="NAME", repeat=True
    )


def draw_rankings(run: Study, sheet: Sheet, options: RankingsOptions) -> None:
    """Spearman's correlation of every two rankings above the diagonal, the ranks of all heads below it.

    Rankings are the importances in heads.csv, or the columns in `ranking`. Intervals are percentiles of 1,000 bootstrap
    samples of heads.
    """
    ranks = ranks_of(run, options.ranking)
    count, size = len(ranks.columns), float(rcParams["xtick.labelsize"])
    names = [shorten(measure_of(name).words, LONGEST * em(), size) for name in ranks.columns]
    margin = max(text_width(name, size) for name in names) / em() + 2
    (axes,) = sheet.panels([""], [(count * CELL, count * CELL)], bar=True, beside=margin, above=margin)
    shades = ScalarMappable(Normalize(-1, 1), "RdBu_r")
    share = 1 - (ranks.to_numpy(float) - 0.5) / len(ranks)  # 1: the most important
    coordinates, fewer = EDGE + (1 - 2 * EDGE) * share, min(1.0, MANY_HEADS / len(ranks))
    looks: dict[str, Any] = {"s": 1.6 * fewer, "linewidths": 0, "alpha": 0.3 + 0.5 * fewer}
    for row, column in zip(*np.tril_indices(count, -1), strict=True):
        axes.add_patch(Rectangle((int(column), int(row)), 1, 1, facecolor=PALE, edgecolor="white"))
        xs, ys = column + coordinates[:, column], row + 1 - coordinates[:, row]
        axes.scatter(xs, ys, c=[SITE_COLORS[site] for site in run.heads["site"]], **looks)
    sheet.after_layout.append(lambda: _write_correlations(axes, ranks, shades))
    axes.set(xlim=(0, count), ylim=(count, 0))
    axes.set_yticks(np.arange(count) + 0.5, names, parse_math=False)
    axes.set_xticks(np.arange(count) + 0.5, names, parse_math=False, rotation=90)
    charts.hide_frame(axes)
    sheet.scale(shades, [axes], "rank correlation")
    sheet.key(
        *(swatch(SITE_COLORS[site], site) for site in dict.fromkeys(run.heads["site"])),
        "below the diagonal: a point per head, its ranks from the most important (top right) down",
    )
    what = f"Spearman's rank correlation of {len(ranks)} heads, 95 % interval"
    sheet.headline("How much rankings of heads agree", f"{run.model} · {run.data} · {what}")


def ranks_of(run: Study, rankings: Sequence[str] = ()) -> pd.DataFrame:
    """A column a ranking, a row a head: 1 is the most important head; tied heads have their mean rank.

    A ranking has a number for every head, and not the same for all. MissingTable if the run has fewer than two;
    ConfigError for a name that is no ranking.
    """
    signs = {name: {"highest": -1.0, "lowest": 1.0}.get(measure_of(name).keep) for name in run.measures}
    values = {name: run.heads[name].to_numpy(float) * sign for name, sign in signs.items() if sign is not None}
    usable = {name: column for name, column in values.items() if np.isfinite(column).all() and np.ptp(column) > 0}
    for name in rankings:
        if run.require(name) not in usable:
            raise ConfigError(f"run {run.name}: {name} is no ranking of all heads; choose from {', '.join(usable)}")
    names = list(dict.fromkeys(rankings or [measure.name for measure in importances(run) if measure.name in usable]))
    if len(names) < 2:
        raise MissingTable(
            f"run {run.name} has {len(names)} rankings, and it takes two; analyze with {flag.importance}"
        )
    return pd.DataFrame({name: usable[name] for name in names}).rank()


def correlations(ranks: pd.DataFrame) -> tuple[Array, Array, Array]:
    """Correlation of every two columns [m m], and the ends of its interval."""
    table = ranks.to_numpy(float)
    draws = np.random.default_rng(SEED).integers(len(table), size=(DRAWS, len(table)))
    with np.errstate(invalid="ignore", divide="ignore"):
        low, high = np.nanpercentile([np.corrcoef(table[rows].T) for rows in draws], (2.5, 97.5), axis=0)
        return np.asarray(np.corrcoef(table.T)), low, high


def _write_correlations(axes: Axes, ranks: pd.DataFrame, shades: ScalarMappable) -> None:
    """The correlations above the diagonal, with their intervals where these fit."""
    value, low, high = correlations(ranks)
    size = float(rcParams["xtick.labelsize"])
    wide, tall = charts.cell_inches(axes)
    fits = bool(wide > text_width("−0.00 to", size) and tall > 4 * size / 72)
    for row, column in zip(*np.triu_indices(len(value), 1), strict=True):
        color = shades.to_rgba(value[row, column])
        axes.add_patch(Rectangle((int(column), int(row)), 1, 1, facecolor=color, edgecolor="white"))
        text = f"{value[row, column]:.2f}" + f"\n{low[row, column]:.2f} to\n{high[row, column]:.2f}" * fits
        center = column + 0.5, row + 0.5
        axes.text(*center, text.replace("-", "−"), size=size, color=contrast(color), ha="center", va="center")


RANKINGS = PlotFigure(
    "rankings",
    "Rankings of heads against each other: how much they agree, with intervals, and the ranks of all heads.",
    draw_rankings,
    Options=RankingsOptions,
    every_run=True,
    order=200,
)


def draw_needs(runs: Sequence[Study], sheet: Sheet, _: object) -> None:
    """For each importance and function: the probability that a head with the function is needed more than another."""
    table = need_over_models([(run.heads, importances(run)) for run in runs])
    if table.empty:
        missing = "function that some heads have and others lack" if any(map(importances, runs)) else "importance"
        names = ", ".join(run.name for run in runs)
        raise ConfigError(f"{names}: there is no {missing}; analyse more text, with {flag.importance}")
    functions, measures = (list(dict.fromkeys(table[column])) for column in ("name", "measure"))
    size = (20.0, len(functions) * ROW)
    panels = sheet.panels([measure_of(name).words for name in measures], [size] * len(measures))
    for axes, measure in zip(panels, measures, strict=True):
        axes.axvline(0.5, color=GREY, linewidth=0.6)
        for row in table[table["measure"] == measure].to_dict("records"):
            line = functions.index(row["name"])
            for number, value in enumerate(row["each"]):
                axes.plot([value], [line], "o", color=color_of(number), alpha=0.55)
            if row["models"] > 1:
                axes.plot([row["needed_low"], row["needed_high"]], [line] * 2, color="black")
                axes.plot([row["needed"]], [line], "D", color="black", markersize=2.8)
        axes.set(xlim=(-0.03, 1.03), ylim=(len(functions) - 0.5, -0.5), xlabel="needed more than others")
        axes.set_yticks(range(len(functions)), functions)
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    dots = [stroke(color_of(n), f"{run.name} · {run.model}", "none", marker="o") for n, run in enumerate(runs)]
    mean = stroke("black", "mean over models, 95 % interval", marker="D")
    sheet.key(*dots, *([mean] if len(runs) > 1 else []))
    subtitle = "probability that a head with the function is needed more than another head of its model"
    sheet.headline("Do functions predict importance?", subtitle)


def importances(run: Study) -> list[Measure]:
    """The measures of importance that a run has and that compare heads of all layers."""
    columns = measured_columns()
    measures = [columns[name] for name in run.measures if name in columns]
    return [measure for analysis, measure in measures if analysis.group == "importance" and measure.orders]


NEEDS = PlotFigure(
    "needs",
    "Do functions predict importance, over models: functions × importances, with intervals.",
    draw_needs,
    source=RUNS,
    runs="together",
    order=330,
)


@dataclass(frozen=True)
class FaithfulnessFigureOptions:
    """Options of the figure."""

    metric: str | None = option(None, "Curves of: loss (unasked), accuracy, bleu, or the objective's.", metavar="NAME")


def draw_faithfulness(run: Study, sheet: Sheet, options: FaithfulnessFigureOptions) -> None:
    """A panel with the area of every ranking, the best on top; then the curves of each ranking."""
    table, curves = run.table("faithfulness_rankings"), run.table("faithfulness")
    metrics = list(dict.fromkeys(curves["metric"]))
    metric = options.metric or metrics[0]
    if metric not in metrics:
        raise MissingTable(f"run {run.name}: faithfulness.csv has no metric {metric!r}; it has {', '.join(metrics)}")
    rows = curves[curves["metric"] == metric]
    words = {name: measure_of(name).words for name in table["ranking"]}
    names = [name for name in words if name in set(rows["ranking"])]
    titles = [f"{number}  {words[name].partition(',')[0]}" for number, name in enumerate(names, start=1)]
    sizes = [(22.0, max(8.0, 1.7 * len(table)) + ABOVE), *[(22.0, 14.0)] * len(names)]
    areas, *panels = sheet.panels(["area between its curves", *titles], sizes, starts={1}, share="y")
    number: Any = areas.get_subplotspec()
    areas.set_subplotspec(number.get_gridspec()[0, :].subgridspec(1, 1)[0])  # with labels of its own width and height
    _draw_areas(areas, table, METRICS.get(metrics[0], metrics[0]))
    random = rows[rows["ranking"].str.startswith("random:")]  # in both orders, as a reversed one is random, too
    chance = random.groupby("share")["harm"].agg(["mean", "std"]).dropna()  # empty for fewer than two orders
    for axes, name in zip(panels, names, strict=True):
        frame_chart(axes, "heads removed", METRICS.get(metric, metric))
        _draw_curves(axes, rows[rows["ranking"] == name], chance, method_style(name).color)
    charts.share_limits(panels)
    grey = swatch(LIGHT, f"random orders: mean ± {DEVIATIONS} standard deviations")
    sheet.key(*(stroke(INK, order, dash) for order, dash in ORDERS.items()), *([grey] if len(chance) else []))
    sheet.key("band, whisker: 95 % interval over sentences; area: mean over the share removed")
    subtitle = f"{run.model} · {run.data} · heads removed in the order of a ranking, and the other way round"
    sheet.headline("Which ranking of heads deserves belief", subtitle)


def _draw_areas(axes: Axes, table: pd.DataFrame, unit: str) -> None:
    """Draw a bar for each ranking with its interval; the grey band is of random orders."""
    rows = range(len(table))
    middle, spread = table["area_random"].iloc[0], table["area_random_sd"].iloc[0]
    if pd.notna(middle) and pd.notna(spread):
        axes.axvspan(middle - DEVIATIONS * spread, middle + DEVIATIONS * spread, color=LIGHT, linewidth=0, zorder=0)
    axes.barh(rows, table["area"], height=0.62, color=[method_style(name).color for name in table["ranking"]], zorder=2)
    draw_intervals(axes, table["area"], rows, table["area_low"], table["area_high"])
    frame_chart(axes, unit, "")
    axes.axvline(0, color=INK, linewidth=0.6, zorder=3)
    size = float(rcParams["ytick.labelsize"])
    names = [shorten(measure_of(name).words, LONGEST * em(), size) for name in table["ranking"]]
    axes.set_yticks(rows, [f"{number}  {name}" for number, name in enumerate(names, start=1)])
    axes.set_ylim(len(table) - 0.5, -0.5)


def _draw_curves(axes: Axes, ranking: pd.DataFrame, chance: pd.DataFrame, color: str) -> None:
    if len(chance):
        reach = DEVIATIONS * chance["std"]
        axes.fill_between(chance.index, chance["mean"] - reach, chance["mean"] + reach, color=LIGHT, linewidth=0)
    for order, dash in ORDERS.items():
        curve = ranking[ranking["order"] == order]
        band = (curve["harm_low"], curve["harm_high"]) if curve["harm_low"].notna().any() else (None, None)
        looks: dict[str, Any] = {"marker": "o", "markersize": 2.2, "markerfacecolor": color if dash == "-" else "white"}
        draw_curve(axes, curve["share"], curve["harm"], color, low=band[0], high=band[1], linestyle=dash, **looks)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


FAITHFULNESS = PlotFigure(
    "faithfulness",
    "Heads removed in the order of every ranking: which ranking deserves belief (`analyze --faithfulness`).",
    draw_faithfulness,
    Options=FaithfulnessFigureOptions,
    every_run=True,
    order=210,
)
