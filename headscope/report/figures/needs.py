"""Do functions predict importance, over several models? Functions × importances, with intervals over models."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from headscope.config.declarations import Measure, measure_of, measured_columns
from headscope.engine.evidence.function_need import need_over_models
from headscope.errors import ConfigError
from headscope.report.marks import color_of
from headscope.report.registry import RUNS, PlotFigure
from headscope.report.sheet import GREY, Sheet, stroke
from headscope.results.study import Study

ROW = 2.0


def draw_needs(runs: Sequence[Study], sheet: Sheet, _: object) -> None:
    """A panel per importance, a line per function: how likely a head with it is needed more than another head.

    A dot a run, and where there are several their mean with its 95 % interval over models.
    """
    table = need_over_models([(run.heads, importances(run)) for run in runs])
    if table.empty:
        lacking = "function that some heads have and others lack" if any(map(importances, runs)) else "importance"
        names = ", ".join(run.name for run in runs)
        raise ConfigError(f"{names}: there is no {lacking}; analyse more text, with --importance")
    functions, measures = (list(dict.fromkeys(table[column])) for column in ("name", "measure"))
    size = (20.0, len(functions) * ROW)
    panels = sheet.panels([measure_of(name).words for name in measures], [size] * len(measures))
    for axes, measure in zip(panels, measures, strict=True):
        _draw_panel(axes, table[table["measure"] == measure].set_index("name").reindex(functions))
    dots = [stroke(color_of(n), f"{run.name} · {run.model}", "none", marker="o") for n, run in enumerate(runs)]
    mean = stroke("black", "mean over models, 95 % interval", marker="D")
    sheet.key(*dots, *([mean] if len(runs) > 1 else []))
    subtitle = "probability that a head with the function is needed more than another head of its model"
    sheet.headline("Do functions predict importance?", subtitle)


def importances(run: Study) -> list[Measure]:
    """The importances that a run has."""
    declared = measured_columns()
    known = [declared[name] for name in run.measures if name in declared]
    return [measure for analysis, measure in known if analysis.group == "importance" and measure.orders]


def _draw_panel(axes: Axes, rows: pd.DataFrame) -> None:
    axes.axvline(0.5, color=GREY, linewidth=0.6)
    for line, row in enumerate(rows.to_dict("records")):
        if not isinstance(row["each"], np.ndarray):
            continue
        for number, value in enumerate(row["each"]):
            axes.plot([value], [line], "o", color=color_of(number), alpha=0.55)
        if row["models"] > 1:
            axes.plot([row["needed_low"], row["needed_high"]], [line] * 2, color="black")
            axes.plot([row["needed"]], [line], "D", color="black", markersize=2.8)
    axes.set(xlim=(-0.03, 1.03), ylim=(len(rows) - 0.5, -0.5), xlabel="needed more than others")
    axes.set_yticks(range(len(rows)), list(rows.index))
    axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])


NEEDS = PlotFigure(
    "needs",
    "Do functions predict importance, over models: functions × importances, with intervals.",
    draw_needs,
    source=RUNS,
    runs="together",
    order=330,
)
