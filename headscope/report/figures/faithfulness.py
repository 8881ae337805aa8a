"""Faithfulness of rankings: both removal curves of every ranking, and the areas between them as bars."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.report.charts import draw_course, draw_intervals, frame_chart, share_limits
from headscope.report.marks import method_style
from headscope.report.registry import PlotFigure
from headscope.report.sheet import INK, Sheet, em, shorten, stroke, swatch
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

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
class FaithfulnessFigureOptions:
    """Options of the figure."""

    metric: str | None = option(None, "Curves of: loss (unasked), accuracy, bleu, or the objective's.", metavar="NAME")


def draw_faithfulness(run: Study, sheet: Sheet, options: FaithfulnessFigureOptions) -> None:
    """Bars of the areas first, the best ranking on top; then a panel of curves for each ranking.

    A ranking has its colour in both. Grey is what random orders of heads give: mean ± 2 standard deviations.
    """
    table, curves = run.table("faithfulness_rankings"), run.table("faithfulness")
    metrics = list(dict.fromkeys(curves["metric"]))
    metric = options.metric or metrics[0]
    if metric not in metrics:
        raise MissingTable(f"run {run.name}: faithfulness.csv has no metric {metric!r}; it has {', '.join(metrics)}")
    shown = curves[curves["metric"] == metric]
    names = [name for name in table["ranking"] if name in set(shown["ranking"])]
    titles = [
        "area between its curves",
        *(f"{place + 1}  {measure_of(name).words.partition(',')[0]}" for place, name in enumerate(names)),
    ]
    sizes = [(22.0, max(8.0, 1.7 * len(table)))] + [(22.0, 14.0)] * len(names)
    areas, *panels = sheet.panels(titles, sizes, starts={1}, share="y")
    place: Any = areas.get_subplotspec()
    areas.set_subplotspec(place.get_gridspec()[0, :])
    _draw_areas(areas, table, METRICS.get(metrics[0], metrics[0]))
    chance = _chance(shown)
    for axes, name in zip(panels, names, strict=True):
        frame_chart(axes, "heads removed", METRICS.get(metric, metric))
        _draw_curves(axes, shown[shown["ranking"] == name], chance, method_style(name).color)
    share_limits(panels)
    random = swatch(LIGHT, f"random orders: mean ± {DEVIATIONS} standard deviations")
    sheet.key(*(stroke(INK, order, dash) for order, dash in ORDERS.items()), *([random] if len(chance) else []))
    sheet.key("band, whisker: 95 % interval over sentences; area: mean over the share removed")
    subtitle = f"{run.model} · {run.data} · heads removed in the order of a ranking, and the other way round"
    sheet.headline("Which ranking of heads deserves belief", subtitle)


def _chance(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean and deviation of the harm of random orders by share of heads removed; empty for fewer than two orders."""
    chance = curves[curves["ranking"].str.startswith("random:")]  # reversed they are random too
    return chance.groupby("share")["harm"].agg(["mean", "std"]).dropna()


def _draw_areas(axes: Axes, table: pd.DataFrame, unit: str) -> None:
    """A bar for each ranking with its interval; what random orders give is the grey band."""
    rows = range(len(table))
    middle, spread = table["area_random"].iloc[0], table["area_random_sd"].iloc[0]
    if pd.notna(middle) and pd.notna(spread):
        axes.axvspan(middle - DEVIATIONS * spread, middle + DEVIATIONS * spread, color=LIGHT, linewidth=0, zorder=0)
    axes.barh(rows, table["area"], height=0.62, color=[method_style(name).color for name in table["ranking"]], zorder=2)
    draw_intervals(axes, table["area"], rows, table["area_low"], table["area_high"])
    frame_chart(axes, unit, "")
    axes.axvline(0, color=INK, linewidth=0.6, zorder=3)
    size = float(rcParams["ytick.labelsize"])
    names = [shorten(measure_of(name).words, 20 * em(), size) for name in table["ranking"]]
    axes.set_yticks(rows, [f"{place + 1}  {name}" for place, name in enumerate(names)])
    axes.set_ylim(len(table) - 0.5, -0.5)


def _draw_curves(axes: Axes, ranking: pd.DataFrame, chance: pd.DataFrame, color: str) -> None:
    if len(chance):
        reach = DEVIATIONS * chance["std"]
        axes.fill_between(chance.index, chance["mean"] - reach, chance["mean"] + reach, color=LIGHT, linewidth=0)
    for order, dash in ORDERS.items():
        curve = ranking[ranking["order"] == order]
        band = (curve["harm_low"], curve["harm_high"]) if curve["harm_low"].notna().any() else (None, None)
        looks: dict[str, Any] = {"marker": "o", "markersize": 2.2, "markerfacecolor": color if dash == "-" else "white"}
        draw_course(axes, curve["share"], curve["harm"], color, low=band[0], high=band[1], linestyle=dash, **looks)
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
