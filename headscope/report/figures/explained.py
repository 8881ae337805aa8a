"""What explains each head: shares of position, tokens, classes, pairs of words and syntax, stacked."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headscope.report.layout.grid import tick_step
from headscope.report.layout.legend import Entry, Legend
from headscope.report.layout.output import widest
from headscope.report.layout.page import LABEL, PALE, TICK, Page
from headscope.report.layout.panels import Panels, shared_pitch
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

PARTS = {
    "position": ("position", "#0072b2"),
    "token": ("the key token", "#56b4e9"),
    "classes": ("classes", "#009e73"),
    "lexical": ("pairs of words", "#e69f00"),
    "syntax": ("syntax", "#cc79a7"),
}
"""The groups of a description in words, and their colours (Okabe and Ito)."""
PITCH, HEIGHT = 0.16, 1.0
LEFT, ABOVE, BELOW = 0.34, 0.2, 0.4
MEAN_GAP = 0.6  # columns between the heads and the layer's mean


def explained_shares(run: Study) -> Figure:
    """A bar for every head and one for the mean of its layer; the line at the end of a bar is the 95 % interval.

    What is above a bar only the sentence says. Parts that a group takes away (the held-out share fell) are not drawn.
    """
    if "explained" not in run.heads:
        raise MissingTable(f"run {run.name} has no explained shares; run `headscope analyze … --also explained` first")
    known = run.heads.dropna(subset=["explained"])
    if known.empty:
        raise MissingTable(f"run {run.name}: no head has an explained share; analyse more sentences")
    counted = set(zip(known["site"], known["layer"], strict=True))
    most = run.most_heads
    cells = most + MEAN_GAP + 1
    pitch = shared_pitch(PITCH, cells, run, left=LEFT + 0.1, most=13.9, only=counted)
    size = (LEFT + cells * pitch + 0.1, ABOVE + HEIGHT + BELOW)
    panels = Panels.plan(run, size, widest=widest(13.9), only=counted)
    entries: list[Entry] = [("    ", color, words) for words, color in PARTS.values()]
    entries += [("    ", PALE, "only the sentence says it"), ("μ", "", "mean of the layer")]
    page_width = max(panels.flow.width, 4.6)
    legend = Legend.plan(entries, widest(page_width))
    page = Page(
        page_width,
        panels.flow.height + legend.height,
        title="What explains each head",
        subtitle=f"{run.model} · {run.data} · share on sentences that the description was not fitted to",
        footer=run.signature,
    )
    for panel, (left, top) in panels:
        site, layer, count = panel
        axes = panels.axes(page, panel, left + LEFT, top + ABOVE, (count + MEAN_GAP + 1) * pitch, HEIGHT)
        _draw(axes, run.heads_of(site, layer).sort_values("head"), pitch)
    legend.draw(page, panels.flow.height)
    return page.finished()


def _draw(axes: Axes, rows: pd.DataFrame, pitch: float) -> None:
    count = len(rows)
    place = np.array([*rows["head"], count + MEAN_GAP], dtype=float) + 0.5
    counted = np.isfinite(rows["explained"].to_numpy(float))  # without a share of the whole there are no parts
    drawn = np.append(counted, counted.any())
    axes.bar(place[drawn], 1.0, width=0.86, color=PALE, linewidth=0)
    height = np.zeros(count + 1)
    for group, (_, color) in PARTS.items():
        name = f"explained_{group}"
        values = rows[name].to_numpy(float) if name in rows else np.zeros(count)
        values = np.where(counted, values, np.nan)
        known = values[np.isfinite(values)]
        part = np.nan_to_num(np.append(values, known.mean() if known.size else 0.0)).clip(min=0)
        part = np.minimum(part, 1 - height)
        axes.bar(place, part, bottom=height, width=0.86, color=color, linewidth=0)
        height = height + part
    low, high = (rows[f"explained_{end}"].to_numpy(float).clip(0, 1) for end in ("low", "high"))
    axes.vlines(place[:-1][counted], low[counted], high[counted], color="black", linewidth=0.7)
    shown = list(range(0, count, tick_step(count, pitch)))
    axes.set_xticks([*(head + 0.5 for head in shown), place[-1]], [*map(str, shown), "μ"])
    axes.set_xlim(0, count + MEAN_GAP + 1)
    axes.set_ylim(0, 1)
    axes.set_yticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.tick_params(labelsize=TICK, length=2)
    axes.set_xlabel("head", size=LABEL, labelpad=1.5)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
