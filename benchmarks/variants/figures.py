"""The figure of the study: differences of all seeds from the baseline, with intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from variants.collect import rows_of_runs
from variants.design import ARMS, Arm
from variants.verdicts import Difference, Row, idle, paired_with

from headscope.report.marks import COLORS
from headscope.report.styles import write_figure

SIZE = 7


def draw(folder: Path) -> None:
    """effects.png, from the tables of a folder; nothing where no arm has two pairs of runs."""
    rows = rows_of_runs(folder)
    arms = [
        arm
        for arm in ARMS
        if arm.name not in (*idle(ARMS, rows), "baseline")
        and len(paired_with(rows, arm.name, "baseline", "valid_nll")) > 1
    ]
    if arms:
        write_figure(effects_figure(rows, arms), folder / "figures" / "effects.png", force=True)


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
    effects = [Difference.of(values) for values in differences]
    reaches = [abs(difference.mean) + difference.reach for difference in effects if difference] or [1.0]
    limit = 1.15 * min(max(reaches), 3 * float(np.median(reaches)))
    for line, (values, difference) in enumerate(zip(differences, effects, strict=True)):
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
