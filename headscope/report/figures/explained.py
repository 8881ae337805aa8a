"""What explains each head: shares of position, tokens, classes, pairs of words and syntax, stacked."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from headscope.report.charts import draw_bars
from headscope.report.grid import layer_panels
from headscope.report.sheet import PALE, Sheet, letters
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
MEAN_GAP = 0.6  # columns between the heads and the layer's mean


def draw_explained(run: Study, sheet: Sheet, _: object) -> None:
    """A bar for every head and one for the mean of its layer; the line at the end of a bar is the 95 % interval.

    What is above a bar only the sentence says. Parts that a group takes away (the held-out share fell) are not drawn.
    """
    if "explained" not in run.heads:
        raise MissingTable(f"run {run.name} has no explained shares; run `headscope analyze … --also explained` first")
    known = run.heads.dropna(subset=["explained"])
    if known.empty:
        raise MissingTable(f"run {run.name}: no head has an explained share; analyse more sentences")
    layers = set(zip(known["site"], known["layer"], strict=True))
    size = ((run.most_heads + MEAN_GAP + 1) * 1.7, 11.0)
    for (site, layer), axes in layer_panels(sheet, run, size, layers).items():
        _draw_layer(axes, run.heads_of(site, layer).sort_values("head"), run.most_heads)
    sheet.key(letters("μ", "mean of the layer"))
    note = "share on sentences that the description was not fitted to"
    sheet.headline("What explains each head", f"{run.model} · {run.data} · {note}")


def _draw_layer(axes: Axes, rows: pd.DataFrame, heads: int) -> None:
    places = np.array([*rows["head"], heads + MEAN_GAP], dtype=float)
    counted = np.isfinite(rows["explained"].to_numpy(float))  # without a share of the whole there are no parts
    drawn = np.append(counted, counted.any())
    axes.bar(places[drawn], 1.0, width=0.86, color=PALE, linewidth=0, label="only the sentence says it")
    height, parts = np.zeros(len(places)), {}
    for group, (words, color) in PARTS.items():
        column = rows.get(f"explained_{group}", pd.Series(0.0, index=rows.index))
        values = column.astype(float).where(counted)
        part = np.nan_to_num(np.append(values, values.mean())).clip(min=0)
        part = np.minimum(part, 1 - height)
        parts[words] = color, part
        height = height + part
    draw_bars(axes, places, parts)
    low, high = (rows[f"explained_{end}"].to_numpy(float).clip(0, 1) for end in ("low", "high"))
    axes.vlines(places[:-1][counted], low[counted], high[counted], color="black", linewidth=0.7)
    step = next(step for step in (1, 2, 5, 10, 20, 50) if heads / step <= 12 or step == 50)
    shown = range(0, heads, step)
    axes.set_xticks([*shown, places[-1]], [*map(str, shown), "μ"])
    axes.set(xlim=(-0.5, heads + MEAN_GAP + 0.5), ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="head", ylabel="share")
