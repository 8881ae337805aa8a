"""Faithfulness of rankings: both removal curves of every ranking, and the areas between them as bars."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from headscope.report.layout.page import BAR, GREY, LABEL, RULE, TICK, Page, even_width, flow, text_width
from headscope.report.readers.run import AnalysisRun, MissingTable

WIDTH, HEIGHT, LEFT, ABOVE, BELOW = 1.75, 1.25, 0.5, 0.22, 0.42
WIDEST = 9.4
ROW = 0.2  # inches of a bar
ORDERS = ("most important first", "least important first")
FIRST, LAST, CHANCE = "#d55e00", "#0072b2", "#999999"
METRICS = {
    "loss": "rise of the loss (nats per token)",
    "accuracy": "fall of the accuracy",
    "bleu": "fall of BLEU",
    "representation": "cosine distance to the intact vector",
    "top1": "fall of the largest logit",
    "log-probability": "fall of log p",
}


def faithfulness_figure(run: AnalysisRun, metric: str | None = None) -> Figure:
    """Bars of the areas on top, the best ranking first; below, a panel of curves for each ranking."""
    table, curves = run.rankings, run.faithfulness
    metrics = list(dict.fromkeys(curves["metric"]))
    metric = metric or metrics[0]
    if metric not in metrics:
        raise MissingTable(f"run {run.name}: faithfulness.csv has no metric {metric!r}; it has {', '.join(metrics)}")
    shown = curves[curves["metric"] == metric]
    names = [name for name in table["ranking"] if name in set(shown["ranking"])]
    bars = 0.28 + ROW * len(names) + 0.34
    box = (LEFT + WIDTH, ABOVE + HEIGHT + BELOW)
    placed = flow([box] * len(names), even_width(len(names), box[0], WIDEST))
    page = Page(
        max(placed.width, 6.2),
        bars + 0.3 + placed.height,
        title="Which ranking of heads deserves belief",
        subtitle=f"{run.model} · {run.data} · heads removed in the order of a ranking, and the other way round",
        footer=run.signature,
    )
    _areas(page, table, metrics[0])
    page.text(0, bars, "— most important first", color=FIRST)
    page.text(1.5, bars, "— least important first", color=LAST)
    page.text(3.05, bars, "▪ random orders, from the least to the most harm", color=GREY)
    chance = shown[shown["ranking"].str.startswith("random:")].groupby("share")["harm"]
    highest = float(shown["harm"].max())
    lowest = min(0.0, float(shown["harm"].min()))
    for number, (name, (left, top)) in enumerate(zip(names, placed.corners, strict=True)):
        axes = page.axes(left + LEFT, bars + 0.3 + top + ABOVE, WIDTH, HEIGHT)
        _curves(axes, shown[shown["ranking"] == name], chance.min(), chance.max())
        axes.set_ylim(lowest - 0.03 * (highest - lowest), highest * 1.05 or 1.0)
        axes.set_title(f"{number + 1}  {name}", size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
        if left == 0:
            axes.set_ylabel(METRICS.get(metric, metric), size=TICK, labelpad=3)
    return page.figure


def _areas(page: Page, table: pd.DataFrame, metric: str) -> None:
    """A bar for each ranking with its interval; what random orders give is the grey band."""
    label = max(text_width(name, LABEL) for name in table["ranking"]) + 0.12
    axes = page.axes(label, 0.22, max(page.width - label - BAR, 2.5), ROW * len(table))
    page.text(
        0, 0, f"Area between the curves: {METRICS.get(metric, metric)}, mean over the share removed", weight="bold"
    )
    rows = range(len(table))
    low, high = table["area"] - table["area_low"], table["area_high"] - table["area"]
    axes.barh(rows, table["area"], height=0.68, color=FIRST, alpha=0.85)
    axes.errorbar(
        table["area"], rows, xerr=[low.clip(lower=0), high.clip(lower=0)], fmt="none", ecolor="#222222", lw=0.7
    )
    middle, spread = table["area_random"].iloc[0], table["area_random_sd"].iloc[0]
    if pd.notna(middle) and pd.notna(spread):
        axes.axvspan(middle - 2 * spread, middle + 2 * spread, color=CHANCE, alpha=0.35, lw=0)
    axes.axvline(0, color=RULE, lw=0.6)
    axes.set_yticks(list(rows), list(table["ranking"]), size=LABEL, parse_math=False)
    axes.set_ylim(len(table) - 0.5, -0.5)
    axes.tick_params(axis="x", length=1.5, width=0.4, color=RULE)
    axes.spines[["top", "right"]].set_visible(False)


def _curves(axes: Axes, ranking: pd.DataFrame, chance_low: pd.Series, chance_high: pd.Series) -> None:
    if len(chance_low):
        axes.fill_between(chance_low.index, chance_low, chance_high, color=CHANCE, alpha=0.35, lw=0)
    for order, color in zip(ORDERS, (FIRST, LAST), strict=True):
        curve = ranking[ranking["order"] == order]
        axes.plot(curve["share"], curve["harm"], color=color, lw=1.2, marker=".", ms=3)
        if curve["harm_low"].notna().any():
            axes.fill_between(curve["share"], curve["harm_low"], curve["harm_high"], color=color, alpha=0.2, lw=0)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.yaxis.set_major_locator(MaxNLocator(4))
    axes.set_xlabel("heads removed", size=TICK, labelpad=2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=1.5, width=0.4, color=RULE)
