"""Do functions predict importance, over several models? Functions × importances, with intervals over models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from headscope.config.declarations import Measure, measure_of, measured_columns
from headscope.engine.evidence.function_need import need_over_models
from headscope.errors import ConfigError
from headscope.report.layout.legend import COLORS, Entry, Legend
from headscope.report.layout.output import widest
from headscope.report.layout.page import GREY, LABEL, TICK, Page, Swatch, flow, shorten, text_width
from headscope.report.registry import RUNS, PlotFigure
from headscope.results.study import Study

WIDE, ROW, ABOVE, BELOW = 1.9, 0.2, 0.24, 0.42
PALE_DOT = 0.55


def needs_figure(runs: Sequence[Study]) -> Figure:
    """A panel per importance, a line per function: how likely a head with it is needed more than another head.

    A dot a run, and where there are several their mean with its 95 % interval over models.
    """
    table = need_over_models([(run.heads, importances(run)) for run in runs])
    if table.empty:
        names = ", ".join(run.name for run in runs)
        if any(importances(run) for run in runs):
            raise ConfigError(f"{names}: there is no function that some heads have and others lack; analyse more text")
        raise ConfigError(f"{names}: no importance beside functions; analyse with --importance, or --also lrp,gradient")
    functions = list(dict.fromkeys(table["name"]))
    measures = list(dict.fromkeys(table["measure"]))
    left = max(text_width(name, LABEL) for name in functions) + 0.12
    size = (left + WIDE + 0.15, ABOVE + len(functions) * ROW + BELOW)
    laid = flow([size] * len(measures), widest(13.9), gap=(0.15, 0.1))
    entries: list[Entry] = [
        (Swatch(mark="o", width=0), COLORS[number % len(COLORS)], f"{run.name} · {run.model}")
        for number, run in enumerate(runs)
    ]
    if len(runs) > 1:
        entries.append((Swatch(mark="D"), "black", "mean over models, 95 % interval"))
    legend = Legend.plan(entries, widest(max(laid.width, 4.6)))
    page = Page(
        max(laid.width, 4.6),
        laid.height + legend.height,
        title="Do functions predict importance?",
        subtitle="probability that a head with the function is needed more than another head of its model",
        footer=" / ".join(dict.fromkeys(run.signature for run in runs)),
    )
    for measure, (x, y) in zip(measures, laid.corners, strict=True):
        axes = page.axes(x + left, y + ABOVE, WIDE, len(functions) * ROW)
        own = table[table["measure"] == measure].set_index("name").reindex(functions)
        _draw(axes, own, title=shorten(measure_of(measure).words, WIDE, LABEL, weight="bold"))
    legend.draw(page, laid.height)
    return page.finished()


def importances(run: Study) -> list[Measure]:
    """The importances that a run has."""
    declared = measured_columns()
    known = [declared[name] for name in run.measures if name in declared]
    return [measure for analysis, measure in known if analysis.group == "importance" and measure.orders]


def _draw(axes: Axes, rows: pd.DataFrame, *, title: str) -> None:
    axes.axvline(0.5, color=GREY, linewidth=0.6)
    for line, row in enumerate(rows.to_dict("records")):
        if not isinstance(row["each"], np.ndarray):
            continue
        for number, value in enumerate(row["each"]):
            axes.plot([value], [line], "o", color=COLORS[number % len(COLORS)], markersize=3.5, alpha=PALE_DOT)
        if row["models"] > 1:
            axes.plot([row["needed_low"], row["needed_high"]], [line] * 2, color="black", linewidth=0.9)
            axes.plot([row["needed"]], [line], "D", color="black", markersize=2.8)
    axes.set(xlim=(-0.03, 1.03), ylim=(len(rows) - 0.5, -0.5))
    axes.set_yticks(range(len(rows)), list(rows.index))
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axes.tick_params(labelsize=TICK, length=2)
    axes.set_xlabel("needed more than others", size=LABEL, labelpad=1.5)
    axes.set_title(title, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


NEEDS = PlotFigure(
    "needs",
    "Do functions predict importance, over models: functions × importances, with intervals.",
    needs_figure,
    source=RUNS,
    runs="together",
    order=330,
)
