"""The figures of the study: curves of all seeds, differences with intervals, and what the heads did."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from variants.collect import rows_of_runs
from variants.design import ARMS, REGIME_ARMS, REGIME_CLAIMS, SEEDS, Arm
from variants.page import HEAD_NUMBERS
from variants.regimes import DROPOUT
from variants.verdicts import Difference, Row, idle, paired_with

from headscope.report.layout.legend import COLORS
from headscope.report.layout.output import write_figure

SIZE = 7
MIXERS = ("mixing-free", "mixing")
FULL = 3.0  # half widths of an interval that have the darkest shade


def draw(folder: Path) -> None:
    """All of them, from the tables of a folder; a figure without its numbers is left out."""
    rows = rows_of_runs(folder)
    out_of_work = idle(ARMS, rows)
    arms = [arm for arm in ARMS if arm.name not in out_of_work and any(row["arm"] == arm.name for row in rows)]
    made = {}
    if (folder / "curves.csv").exists():
        curves = pd.read_csv(folder / "curves.csv")
        made["curves.png"] = curves_figure(curves, arms)
        if (folder / DROPOUT / "curves.csv").exists():
            both = pd.concat([curves, pd.read_csv(folder / DROPOUT / "curves.csv")])
            judged = set(both["arm"]) & {name for claim in REGIME_CLAIMS for name in (claim.arm, claim.against)}
            made["regimes.png"] = curves_figure(both, [arm for arm in (*ARMS, *REGIME_ARMS) if arm.name in judged])
    others = [
        arm for arm in arms if len(paired_with(rows, arm.name, "baseline", "valid_nll")) > 1 and arm.name != "baseline"
    ]
    if others:
        made["effects.png"] = effects_figure(rows, others)
        made["heads.png"] = heads_figure(rows, others, folder / "matrices.csv")
    for name, figure in made.items():
        write_figure(figure, folder / "figures" / name, force=True)


def curves_figure(curves: pd.DataFrame, arms: Sequence[Arm]) -> Figure:
    """Left: validation loss by epoch. Right: less the baseline's of the same seed. Thin: seeds, thick: their mean.

    Dashed are means of the arms that have fewer seeds.
    """
    figure = Figure(figsize=(7.2, 3.2), layout="constrained")
    losses, behind = figure.subplots(1, 2)
    table = curves.pivot_table(index="epoch", columns=["arm", "seed"], values="valid_nll")
    late = []  # differences in the second half of the run
    for color, arm in zip(COLORS, arms, strict=False):
        runs = pd.DataFrame(table[arm.name])
        less = runs.sub(pd.DataFrame(table["baseline"])).dropna(axis=1, how="all")
        late += np.asarray(less, dtype=float)[len(less) // 2 :].ravel().tolist()
        for axes, values in ((losses, runs), (behind, less)):
            lines = np.asarray(values, dtype=float)  # epochs, seeds
            axes.plot(table.index, lines, color=color, lw=0.4, alpha=0.5)
            style = "-" if arm.seeds == SEEDS else "--"
            axes.plot(table.index, lines.mean(axis=1), style, color=color, lw=1.4, label=arm.name)
    best = float(table.min().min())
    losses.set_ylim(best - 0.05, best + 0.8)
    behind.set_ylim(np.nanmin(late) - 0.02, np.nanmax(late) + 0.02)
    for axes, title in ((losses, "validation loss, nats per piece"), (behind, "the same − baseline of that seed")):
        axes.set_title(title, fontsize=SIZE + 1, loc="left")
        axes.set_xlabel("epoch", fontsize=SIZE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.tick_params(labelsize=SIZE)
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = losses.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=SIZE, frameon=False)
    return figure


def effects_figure(rows: Sequence[Row], arms: Sequence[Arm]) -> Figure:
    """Paired differences of loss and BLEU, a line an arm; each seed is a dot."""
    figure = Figure(figsize=(7.2, 0.9 + 0.26 * len(arms)), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, title in zip(
        panels, ("valid_nll", "bleu"), ("validation loss − baseline, nats", "BLEU − baseline"), strict=True
    ):
        intervals(axes, [paired_with(rows, arm.name, "baseline", column) for arm in arms])
        axes.set_title(title, fontsize=SIZE + 1, loc="left")
    panels[0].set_yticks(range(len(arms)), [arm.title for arm in arms], fontsize=SIZE)
    panels[0].invert_yaxis()
    return figure


def intervals(axes: Axes, differences: Sequence[Sequence[float]]) -> None:
    """Dots of all seeds, and the mean with its 95 % interval, a line each; a mean far beyond the rest is written."""
    found = [Difference.of(values) for values in differences]
    reaches = [abs(difference.mean) + difference.reach for difference in found if difference] or [1.0]
    limit = 1.15 * min(max(reaches), 3 * float(np.median(reaches)))
    for line, (values, difference) in enumerate(zip(differences, found, strict=True)):
        if difference is None:
            continue
        if abs(difference.mean) > limit:
            side = math.copysign(0.97 * limit, difference.mean)
            text = f"{difference.mean:+.2f} ± {difference.reach:.2f}"
            axes.text(side, line, text, ha="right" if side > 0 else "left", va="center", fontsize=SIZE, color=COLORS[0])
            continue
        axes.plot(values, [line] * len(values), ".", color="0.6", ms=3)
        axes.errorbar(difference.mean, line, xerr=difference.reach, fmt="o", ms=3, color=COLORS[0], capsize=2, lw=1)
    axes.axvline(0, color="0.5", lw=0.6)
    axes.set_xlim(-limit, limit)
    axes.tick_params(labelsize=SIZE)
    axes.spines[["top", "right", "left"]].set_visible(False)


def heads_figure(rows: Sequence[Row], arms: Sequence[Arm], matrices: Path) -> Figure:
    """Numbers of heads by arm as differences from the baseline, and a mixing matrix of each kind beside them."""
    columns = [column for column in HEAD_NUMBERS if any(column in row for row in rows)]
    figure = Figure(figsize=(7.2, 1.4 + 0.24 * len(columns)), layout="constrained")
    grid = figure.add_gridspec(2, 2, width_ratios=(3.4, 1))
    axes = figure.add_subplot(grid[:, 0])
    differences_panel(axes, rows, arms, columns)
    if matrices.exists():
        table = pd.read_csv(matrices)
        panels = [figure.add_subplot(grid[place, 1]) for place in range(len(MIXERS))]
        for panel, name in zip(panels, MIXERS, strict=True):
            matrix_panel(panel, table[table["arm"] == name], name)
    return figure


def differences_panel(axes: Axes, rows: Sequence[Row], arms: Sequence[Arm], columns: Sequence[str]) -> None:
    """A line a number, a column an arm: the mean difference, shaded by its size in half widths of its interval."""
    shades = np.full((len(columns), len(arms)), np.nan)
    for line, column in enumerate(columns):
        found = [Difference.of(paired_with(rows, arm.name, "baseline", column)) for arm in arms]
        digits = 1 if any(difference and abs(difference.mean) >= 1 for difference in found) else 3
        for place, difference in enumerate(found):
            if difference is None:
                axes.text(place, line, "–", ha="center", va="center", fontsize=SIZE - 1.5)
                continue
            shade = shades[line, place] = difference.mean / max(difference.reach, 1e-12)
            ink, weight = ("white" if abs(shade) > 0.75 * FULL else "black"), ("bold" if abs(shade) > 1 else "normal")
            text = f"{difference.mean:+.{digits}f}"
            axes.text(place, line, text, ha="center", va="center", fontsize=SIZE - 1.5, color=ink, weight=weight)
    picture = axes.imshow(shades, cmap="RdBu_r", vmin=-FULL, vmax=FULL, aspect="auto")
    axes.set_xticks(range(len(arms)), [arm.name for arm in arms], rotation=35, ha="right", fontsize=SIZE)
    axes.set_yticks(range(len(columns)), [HEAD_NUMBERS[column] for column in columns], fontsize=SIZE)
    axes.set_title("difference from the baseline; bold: 95 % interval without 0", fontsize=SIZE, loc="left")
    axes.tick_params(length=0)
    bar = axes.figure.colorbar(picture, ax=axes, orientation="horizontal", shrink=0.6, aspect=40, pad=0.02)
    bar.set_label("difference, in half widths of its 95 % interval", fontsize=SIZE)
    bar.ax.tick_params(labelsize=SIZE)


def matrix_panel(axes: Axes, entries: pd.DataFrame, name: str) -> None:
    """The mixing matrix of the first module that has one; the table has those of seed 1."""
    if entries.empty:
        axes.set_axis_off()
        return
    site, layer = entries[["site", "layer"]].iloc[0]
    of_module = entries[(entries["site"] == site) & (entries["layer"] == layer)]
    matrix = np.asarray(of_module.pivot(index="head", columns="source", values="alpha"), dtype=float)
    limit = float(np.abs(matrix).max())
    picture = axes.imshow(matrix, cmap="PuOr_r", vmin=-limit, vmax=limit)
    bar = axes.figure.colorbar(picture, ax=axes, orientation="horizontal", shrink=0.9)
    bar.ax.tick_params(labelsize=SIZE - 1)
    axes.set_title(f"{name}\n{site} {layer}", fontsize=SIZE, loc="left")
    axes.set_xlabel("mixed in", fontsize=SIZE)
    axes.set_ylabel("head", fontsize=SIZE)
    axes.tick_params(labelsize=SIZE - 1)
