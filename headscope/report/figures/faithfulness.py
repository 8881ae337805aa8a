"""Faithfulness of rankings: both removal curves of every ranking, and the areas between them as bars."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from headscope.config import option
from headscope.config.declarations import measure_of
from headscope.report.layout.legend import Entry, Legend, method_style
from headscope.report.layout.output import panel_width, widest
from headscope.report.layout.page import (
    INK,
    LABEL,
    RULE,
    TICK,
    Dashes,
    Page,
    Swatch,
    even_width,
    flow,
    shorten,
    text_width,
    wrap,
)
from headscope.report.layout.panels import chart, share_limits, short_number
from headscope.report.registry import PlotFigure
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

WIDTH, HEIGHT, LEFT, ABOVE, BELOW = 1.75, 1.25, 0.5, 0.22, 0.36
WIDEST = 9.8
ROW, TICKS = 0.2, 0.34  # inches of a bar, and of the numbers below all bars
LONGEST = 2.0  # inches of a ranking's title beside its bar
ORDERS: dict[str, Dashes] = {"most important first": "-", "least important first": "--"}
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


def faithfulness_figure(run: Study, metric: str | None = None) -> Figure:
    """Bars of the areas on top, the best ranking first; below, a panel of curves for each ranking.

    A ranking has its colour in both. Grey is what random orders of heads give: mean ± 2 standard deviations.
    """
    table, curves = run.table("faithfulness_rankings"), run.table("faithfulness")
    metrics = list(dict.fromkeys(curves["metric"]))
    metric = metric or metrics[0]
    if metric not in metrics:
        raise MissingTable(f"run {run.name}: faithfulness.csv has no metric {metric!r}; it has {', '.join(metrics)}")
    shown = curves[curves["metric"] == metric]
    names = [name for name in table["ranking"] if name in set(shown["ranking"])]
    wide = panel_width(WIDTH, len(names), left=LEFT, gap=0.2, most=WIDEST)
    box = (LEFT + wide, ABOVE + HEIGHT + BELOW)
    placed = flow([box] * len(names), even_width(len(names), box[0], widest(WIDEST)), gap=(0.2, 0.1))
    width = widest(max(placed.width, 6.2))
    title = wrap(
        f"Area between the curves: {METRICS.get(metrics[0], metrics[0])}, mean over the share removed", width, LABEL
    )
    head = 0.08 + 0.15 * len(title)
    chance = _chance(shown)
    entries: list[Entry] = [(Swatch(line=dash), INK, order) for order, dash in ORDERS.items()]
    entries.append(("", "", "band, whisker: 95 % interval over sentences"))
    if len(chance):
        entries.insert(2, (Swatch(band=True), LIGHT, f"random orders: mean ± {DEVIATIONS} standard deviations"))
    legend = Legend.plan(entries, width)
    bars = head + ROW * len(table) + TICKS
    page = Page(
        width,
        bars + placed.height + legend.height,
        title="Which ranking of heads deserves belief",
        subtitle=f"{run.model} · {run.data} · heads removed in the order of a ranking, and the other way round",
        footer=run.signature,
    )
    for number, line in enumerate(title):
        page.text(0, 0.15 * number, line, weight="bold")
    _areas(page, table, head)
    panels = []
    for number, (name, (left, top)) in enumerate(zip(names, placed.corners, strict=True)):
        axes = page.axes(left + LEFT, bars + top + ABOVE, wide, HEIGHT)
        chart(
            axes,
            title=f"{number + 1}  {measure_of(name).words}",
            xlabel="heads removed",
            ylabel=METRICS.get(metric, metric) if left == 0 else "",
            width=wide,
        )
        _curves(axes, shown[shown["ranking"] == name], chance, method_style(name).color)
        panels.append(axes)
    share_limits(panels)
    legend.draw(page, bars + placed.height)
    return page.finished()


def _chance(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean and deviation of the harm of random orders by share of heads removed; empty for fewer than two orders."""
    chance = curves[curves["ranking"].str.startswith("random:")]  # reversed they are random too
    return chance.groupby("share")["harm"].agg(["mean", "std"]).dropna()


def _areas(page: Page, table: pd.DataFrame, top: float) -> None:
    """A bar for each ranking with its interval; what random orders give is the grey band."""
    titles = [shorten(measure_of(name).words, LONGEST, LABEL) for name in table["ranking"]]
    label = max(text_width(title, LABEL) for title in titles) + 0.12
    axes = page.axes(label, top, max(page.width - label - 0.15, 0.8), ROW * len(table))
    rows = range(len(table))
    low, high = table["area"] - table["area_low"], table["area_high"] - table["area"]
    middle, spread = table["area_random"].iloc[0], table["area_random_sd"].iloc[0]
    if pd.notna(middle) and pd.notna(spread):
        reach = DEVIATIONS * spread
        axes.axvspan(middle - reach, middle + reach, color=LIGHT, lw=0, zorder=0)
    colors = [method_style(name).color for name in table["ranking"]]
    axes.barh(rows, table["area"], height=0.62, color=colors, alpha=0.9, zorder=2)
    errors = [low.clip(lower=0), high.clip(lower=0)]
    axes.errorbar(table["area"], rows, xerr=errors, fmt="none", ecolor=INK, elinewidth=0.8, capsize=1.5, capthick=0.8)
    axes.axvline(0, color=INK, lw=0.6, zorder=3)
    axes.set_yticks(list(rows), titles, parse_math=False)
    axes.tick_params(axis="y", labelsize=LABEL)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(short_number)
    axes.tick_params(axis="x", length=1.5, width=0.4, color=RULE, labelsize=TICK)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _curves(axes: Axes, ranking: pd.DataFrame, chance: pd.DataFrame, color: str) -> None:
    if len(chance):
        reach = DEVIATIONS * chance["std"]
        axes.fill_between(chance.index, chance["mean"] - reach, chance["mean"] + reach, color=LIGHT, lw=0, zorder=1)
    for order, dash in ORDERS.items():
        curve = ranking[ranking["order"] == order]
        filled = color if dash == "-" else "white"
        axes.plot(
            curve["share"], curve["harm"], dash, color=color, lw=1.2, marker="o", ms=2.2, mfc=filled, mew=0.7, zorder=3
        )
        if curve["harm_low"].notna().any():
            axes.fill_between(
                curve["share"], curve["harm_low"], curve["harm_high"], color=color, alpha=0.2, lw=0, zorder=2
            )
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))


FAITHFULNESS = PlotFigure(
    "faithfulness",
    "Heads removed in the order of every ranking: which ranking deserves belief (`analyze --faithfulness`).",
    faithfulness_figure,
    Options=FaithfulnessFigureOptions,
    every_run=True,
    order=210,
)
