"""Figures of pruning runs: quality, heads kept per site and layer, functions of the heads kept, gates in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from headscope.config import option
from headscope.errors import ConfigError
from headscope.report.charts import frame_chart, share_limits, short_number
from headscope.report.figures.pruned_heads import (
    PruningPanel,
    draw_gates,
    draw_kept_functions,
    draw_layers,
    draw_sites,
    draw_sizes,
    has_seeds,
)
from headscope.report.marks import method_style
from headscope.report.registry import PlotFigure, Source
from headscope.report.sheet import INK, Sheet
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.sweep import UNPRUNED, Sweep

METRICS = {"bleu": "BLEU", "perplexity": "perplexity", "accuracy": "accuracy"}
SAND = "#f6ecd2"  # grey is of random choices
LOG_FROM = 8  # sizes that span this factor are set on a logarithmic axis
LOG_QUALITY_FROM = 20  # and so are perplexities that span this one
MOST_NOTES = 24


@dataclass(frozen=True)
class PruningFigureOptions:
    """Options of the figure."""

    figure: str | None = option(
        None,
        "quality: metric against heads kept; sites: heads kept at each site; layers: in its layers; functions: of the "
        "survivors; gates: while they learn. Default: quality for sweeps, sites for other runs.",
        metavar="quality|sites|layers|functions|gates",
    )
    functions: Path | None = option(None, "A run of `headscope analyze` that labels the heads.", metavar="RUN")


def draw_pruning(runs: Sequence[Sweep], sheet: Sheet, options: PruningFigureOptions) -> None:
    """One of the figures: quality, sites, layers, functions or gates; None is quality for sweeps, sites for other runs.

    `functions` is a run of `analyze` that labels heads. ConfigError for an unknown name; RunError where the runs lack
    what the figure shows.
    """
    kind = options.figure or ("quality" if any(run.measured for run in runs) else "sites")
    if kind not in FIGURES:
        raise ConfigError(f"--figure {kind!r} is not known; choose from {', '.join(FIGURES)}")
    title, make = FIGURES[kind]
    if options.functions:
        labels = Study.open(options.functions)
        runs = [run.with_labels(labels) for run in runs]
    panels = make(runs, sheet)
    if not panels:
        raise RunError("there is no pruned model in these runs yet")
    alike: dict[str, list[Axes]] = {}
    drawn = sheet.panels([panel.title for panel in panels], [(26.0, 17.5)] * len(panels), share="")
    for panel, axes in zip(panels, drawn, strict=True):
        frame_chart(axes, panel.xlabel, panel.ylabel, whole=panel.whole)
        panel.draw(axes)
        alike.setdefault(panel.ylabel, []).append(axes)
    for group in alike.values():
        if group[0].get_autoscaley_on():
            share_limits(group)
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    counts = dict.fromkeys(f"{run.cells['of'].iloc[0]:.0f} heads ({' + '.join(run.sites)})" for run in runs)
    sheet.headline(title, f"{models} · {', '.join(counts)}")


def draw_quality(runs: Sequence[Sweep], sheet: Sheet) -> list[PruningPanel]:
    """The metric and the loss against the heads that stay: a line a method, its seeds as a band and as dots.

    Every line begins at the model with all heads.
    """
    measured = [run for run in runs if run.measured]
    if not measured:
        raise RunError("these runs have no numbers of quality; --figure quality is for `headscope prune sweep`")
    sizes = sorted({round(count) for run in measured for name in ("kept", "of") for count in run.cells[name]})
    panels = []
    for run in measured:
        metric = str(run.cells["metric"].iloc[0])
        columns = {"value": METRICS.get(metric, metric)}
        if metric != "perplexity":
            columns["loss"] = "loss (nats per token)"
        for column, label in columns.items():
            title = label if len(measured) == 1 else f"{run.name}: {label}"
            perplexities = _span(measured) if metric == "perplexity" and column == "value" else None
            draw = partial(_plot_quality, run, column, sizes, perplexities)
            panels.append(PruningPanel(title, draw, "heads kept", label))
        verdicts = [line.split(";")[0] for line in run.record.get("conclusions", [])[:MOST_NOTES]]
        sheet.key(*(verdict if len(measured) == 1 else f"{run.name}: {verdict}" for verdict in verdicts))
    if has_seeds(measured):
        sheet.key("line: mean over seeds; small dots: seeds; band: lowest to highest")
    return panels


def _span(runs: Sequence[Sweep]) -> tuple[float, float] | None:
    """Lowest and highest perplexity of all runs, and of the unpruned model's interval, if a linear axis hides some."""
    own = [run for run in runs if (run.cells["metric"] == "perplexity").all()]
    drawn = pd.concat([part for run in own for part in (run.cells["value"], run.unpruned["low"], run.unpruned["high"])])
    low, high = float(drawn.min()), float(drawn.max())
    return (low, high) if 0 < low < high / LOG_QUALITY_FROM and math.isfinite(high) else None


def _plot_quality(
    run: Sweep, column: str, sizes: Sequence[int], perplexities: tuple[float, float] | None, axes: Axes
) -> None:
    unpruned = run.unpruned.head(1)
    for _, row in unpruned.iterrows():
        axes.axhline(row[column], color=INK, linestyle=":", zorder=1, label="unpruned")
        if column == "value" and pd.notna(row["low"]):
            interval = "its 95 % interval over sentences"
            axes.axhspan(row["low"], row["high"], color=SAND, linewidth=0, zorder=0, label=interval)
    pruned = run.cells[run.cells["method"] != UNPRUNED]
    for (method, control), cells in pruned.groupby(["method", "control"], sort=False):
        _draw_method(axes, cells, unpruned, column, str(method), control=bool(control))
    _set_sizes(axes, sizes)
    if perplexities is not None:
        axes.set_yscale("log")
        axes.set_ylim(perplexities[0] / 1.3, perplexities[1] * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
        axes.yaxis.set_minor_locator(NullLocator())


def _draw_method(
    axes: Axes, cells: pd.DataFrame, unpruned: pd.DataFrame, column: str, method: str, *, control: bool
) -> None:
    """A method from the unpruned model on; a control, or a method that was tried with all heads too, from there."""
    look = method_style(method)
    whole = control or (cells["kept"] >= cells["of"]).any()
    looks = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"} if control else {"marker": look.mark}
    label = "the same heads per layer, trained from scratch" if control else method
    course = cells if whole else pd.concat([cells, unpruned])
    draw_sizes(axes, course, "kept", column, look.color, label=label, zorder=4, **looks)
    if cells.duplicated("size").any():
        axes.scatter(cells["kept"], cells[column], s=3, color=look.color, alpha=0.6, linewidth=0, zorder=3)


def _set_sizes(axes: Axes, sizes: Sequence[int]) -> None:
    """Heads that stay, logarithmic where the sizes span much."""
    if sizes[0] > 0 and sizes[-1] / sizes[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
        axes.xaxis.set_major_formatter(FuncFormatter(short_number))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        edge = 0.04 * (sizes[-1] - sizes[0]) or 0.5
        axes.set_xlim(sizes[0] - edge, sizes[-1] + edge)


FIGURES: Mapping[str, tuple[str, Callable[[Sequence[Sweep], Sheet], list[PruningPanel]]]] = {
    "quality": ("What pruning costs", draw_quality),
    "sites": ("Where the heads that stay are", draw_sites),
    "layers": ("In which layers the heads that stay are", draw_layers),
    "functions": ("Which functions survive", draw_kept_functions),
    "gates": ("Gates while they learn", draw_gates),
}


PRUNING = PlotFigure(
    "pruning",
    "What pruning costs, where the heads that stay are, which functions survive, and how gates learnt.",
    draw_pruning,
    Options=PruningFigureOptions,
    source=Source(
        "SWEEP|RUN",
        "Directories that `headscope prune sweep`, `l0`, `subset` or `rank` wrote.",
        "headscope.results.sweep:open_pruned",
        at_once=True,
    ),
    runs="together",
    order=500,
)
