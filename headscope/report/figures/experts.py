"""Mixtures of attentive experts (MAE): how much each expert counts, for which tokens, and how gates learnt that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.data.token_text import shown
from headscope.heads import SITES
from headscope.report.figures.training import SHARES, TrainingHistory
from headscope.report.layout.legend import SITE_COLORS, Legend
from headscope.report.layout.output import panel_width, widest
from headscope.report.layout.page import (
    BAR,
    GREY,
    INK,
    LABEL,
    RULE,
    TICK,
    Page,
    Swatch,
    even_width,
    flow,
    shorten,
    text_width,
)
from headscope.report.layout.panels import chart, share_limits, short_number
from headscope.report.registry import TRAINED, PlotFigure
from headscope.results.study import Study
from headscope.results.study_tables import RunError

LEFT, ABOVE, BELOW, ROW = 0.62, 0.22, 0.36, 0.15
BARS, TOKENS = 1.0, 2.3  # inches of the bars of a panel, and of the tokens beside them
WIDEST = 12.0
TIME, BAND = 2.2, 0.13  # inches of a history, and of an expert in it
Module = tuple[str, int]


def experts_figure(run: Study) -> Figure:
    """A panel for every module: each expert's mean responsibility with its interval, and the tokens that go with it."""
    table = run.table("experts", "expert", "lacks", "responsibility", "responsibility_low", "responsibility_high")
    gates = run.table("experts_gates", "entropy", "even")
    tokens = run.table("experts_tokens", "expert", "token", "pmi") if run.has_table("experts_tokens") else None
    found = [(str(site), int(layer)) for site, layer in table[["site", "layer"]].drop_duplicates().to_numpy()]
    modules = sorted(found, key=lambda module: ([*map(str, SITES)].index(module[0]), module[1]))
    most = int(table.groupby(["site", "layer"]).size().max())
    words = TOKENS if tokens is not None and len(tokens) else 0.0
    wide = panel_width(BARS + words, len(modules), left=LEFT, gap=0.25, most=WIDEST)
    bars = min(wide - words, 1.5 * BARS) if words and wide - words > 0.7 else min(wide, max(0.7, wide * 0.35))
    size = (LEFT + wide, ABOVE + most * ROW + BELOW)
    laid = flow([size] * len(modules), even_width(len(modules), size[0], widest(WIDEST), gap=0.25), gap=(0.25, 0.1))
    legend = Legend.plan(
        [
            (Swatch(":"), GREY, "all experts alike"),
            ("−3", "", "an expert: all heads but head 3"),
            ("", "", "bar: mean responsibility; whisker: 95 % interval; beside it: its tokens by mutual information"),
        ],
        widest(max(laid.width, 4.6)),
    )
    page = Page(
        laid.width,
        laid.height + legend.height,
        title="What experts are used for",
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    panels = []
    for (site, layer), (left, top) in zip(modules, laid.corners, strict=True):
        rows = table[(table["site"] == site) & (table["layer"] == layer)].reset_index(drop=True)
        gate = _gate(run, gates, (site, layer))
        axes = page.axes(left + LEFT, top + ABOVE, bars, len(rows) * ROW)
        entropy = f"entropy {gate['entropy']:.2f} of {gate['even']:.2f} nats"
        title = f"{site} · layer {layer} · {entropy}"
        axes.set_title(shorten(title, wide, LABEL, weight="bold"), size=LABEL, loc="left", pad=3, weight="bold")
        _draw_use(axes, rows)
        panels.append(axes)
        if tokens is not None:
            listed = tokens[(tokens["site"] == site) & (tokens["layer"] == layer)]
            for number in range(len(rows)):
                of_expert = listed[listed["expert"] == rows["expert"][number]].sort_values("pmi", ascending=False)
                text = "  ".join(shown(str(token), "▁") for token in of_expert["token"])
                text = shorten(text, wide - bars - 0.12, TICK)
                page.text(left + LEFT + bars + 0.1, top + ABOVE + number * ROW + 0.025, text, size=TICK)
    _same_width(panels)
    legend.draw(page, laid.height)
    return page.finished()


def _gate(run: Study, gates: pd.DataFrame, module: Module) -> pd.Series[Any]:
    """The row of a module; RunError where it has none, or several."""
    rows = gates[(gates["site"] == module[0]) & (gates["layer"] == module[1])]
    if len(rows) != 1:
        raise RunError(f"experts_gates.csv of run {run.name} has {len(rows)} rows of {module[0]}.{module[1]}, not one")
    return rows.iloc[0]


def _draw_use(axes: Axes, rows: pd.DataFrame) -> None:
    value = rows["responsibility"]
    ends = [(value - rows["responsibility_low"]).clip(lower=0), (rows["responsibility_high"] - value).clip(lower=0)]
    axes.barh(range(len(rows)), value, height=0.68, color=SITE_COLORS[str(rows["site"][0])])
    axes.errorbar(value, range(len(rows)), xerr=ends, fmt="none", ecolor=INK, elinewidth=0.7, capsize=1.2)
    axes.axvline(1 / len(rows), color=GREY, lw=1, ls=":")
    names = [_lacks(lacks) for lacks in rows["lacks"]]
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_ylabel("expert", size=TICK, labelpad=2)
    axes.set_xlabel("responsibility", size=TICK, labelpad=1.5)
    axes.tick_params(axis="x", length=1.5, width=0.4, color=RULE)
    axes.locator_params(axis="x", nbins=3)
    axes.xaxis.set_major_formatter(short_number)
    axes.spines[["top", "right"]].set_visible(False)


def _lacks(heads: object) -> str:
    """`1;3` as −1,3: all heads but these; an expert that lacks many by its first."""
    parts = str(heads).removesuffix(".0").split(";")
    text = "−" + ",".join(parts)
    return text if text_width(text, TICK) < LEFT - 0.25 else f"−{parts[0]},…"


def _same_width(panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.set_xlim(0, max(panel.dataLim.x1 for panel in panels) * 1.05)


def gates_figure(run: TrainingHistory) -> Figure:
    """While a mixture trains: the entropy of the gates of each site, and how much every expert of each module counts.

    RunError where the run has no gates, or was trained before they were logged.
    """
    modules = module_shares(run)
    if not modules:
        raise RunError(
            f"training run {run.name} has no gates of experts in its metrics.csv; name a run of `headscope train mae`"
        )
    updates = run.metrics["update"].to_numpy(float)
    most = max(len(shares) for shares in modules.values())
    count = len(modules) + 1
    wide = panel_width(TIME, count, left=LEFT, gap=0.25, most=WIDEST, besides=BAR)
    size = (LEFT + wide, ABOVE + max(most * BAND, 0.9) + BELOW)
    laid = flow([size] * count, even_width(count, size[0], widest(WIDEST, besides=BAR), gap=0.25), gap=(0.25, 0.1))
    sites = [site for site in map(str, SITES) if run.has(f"gate_entropy.{site}")]
    legend = Legend.plan(
        [(Swatch(), SITE_COLORS[site], f"gates of {site}") for site in sites]
        + [(Swatch(":"), GREY, "all experts alike")],
        widest(max(laid.width + BAR, 4.6)),
    )
    page = Page(
        laid.width + BAR,
        laid.height + legend.height,
        title="Gates and experts while they learn",
        subtitle=f"{run.name} · {run.meta.get('variant', '')}",
        footer=str(run.meta.get("signature", "")),
    )
    panels = []
    (left, top), *corners = laid.corners
    axes = page.axes(left + LEFT, top + ABOVE, wide, size[1] - ABOVE - BELOW)
    chart(axes, title="entropy of gates", xlabel="update", ylabel="nats", width=wide, whole=(True, False))
    for site in sites:
        axes.plot(*run.line(f"gate_entropy.{site}", "update"), color=SITE_COLORS[site], lw=1.1)
    axes.axhline(np.log(most), color=GREY, lw=1, ls=":")
    share_limits([axes])
    panels.append(axes)
    largest = max(float(np.nanmax(shares * len(shares))) for shares in modules.values())
    norm = TwoSlopeNorm(1, 0, max(largest, 1.1))
    for ((site, layer), shares), (left, top) in zip(modules.items(), corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, wide, len(shares) * max(BAND, 0.9 / most))
        step = updates[1] - updates[0] if len(updates) > 1 else 1.0
        edges = np.concatenate([[updates[0] - step], updates])  # noted at an update: of those since the line before
        axes.pcolormesh(edges, np.arange(len(shares) + 1), shares * len(shares), cmap="RdBu_r", norm=norm)
        axes.set_title(f"{site} · layer {layer}", size=LABEL, loc="left", pad=4, weight="bold")
        axes.set_ylim(len(shares), 0)
        axes.set_yticks(np.arange(len(shares)) + 0.5, [str(expert) for expert in range(len(shares))])
        axes.set_ylabel("expert" if left == 0 else "", size=TICK, labelpad=3)
        axes.set_xlabel("update", size=TICK, labelpad=2)
        axes.locator_params(axis="x", nbins=4, integer=True)
        axes.xaxis.set_major_formatter(short_number)
        panels.append(axes)
    for axes in panels:
        axes.set_xlim(updates[0], updates[-1] if updates[-1] > updates[0] else updates[0] + 1)
    bar = ScalarMappable(norm, "RdBu_r")
    height = min(size[1] - ABOVE - BELOW, 2.0)
    page.color_bar(laid.width + 0.1, ABOVE, height, bar, label="responsibility, × even", unit="× even")
    legend.draw(page, laid.height)
    return page.finished()


def module_shares(run: TrainingHistory) -> dict[Module, NDArray[np.float64]]:
    """By module [e u]: the mean responsibility of every expert at every line of metrics.csv."""
    columns: dict[Module, dict[int, str]] = {}
    for name in run.metrics.columns:
        kind, *parts = str(name).split(".")
        if kind == SHARES and len(parts) == 3 and parts[0] in SITE_COLORS and parts[1].isdigit() and parts[2].isdigit():
            columns.setdefault((parts[0], int(parts[1])), {})[int(parts[2])] = str(name)
    return {
        module: np.stack([run.metrics[names[expert]].to_numpy(float) for expert in sorted(names)])
        for module, names in columns.items()
        if any(run.has(name) for name in names.values())
    }


GATES = PlotFigure(
    "gates",
    "Gates and experts of a mixture (`train mae`) while they learn: entropies, and how much each expert counts.",
    gates_figure,
    source=TRAINED,
    order=410,
)
