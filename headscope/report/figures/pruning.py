"""Figures of pruning runs: quality, heads kept per site and layer, functions of the heads kept, gates in training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from headscope.config import option
from headscope.config.declarations import head_functions
from headscope.errors import flag
from headscope.report.charts import Chart, draw_bars, draw_charts, draw_curve, short_number
from headscope.report.marks import SITE_COLORS, functions_of, method_style
from headscope.report.registry import PlotFigure, Source
from headscope.report.sheet import INK, Sheet, stroke
from headscope.results.study import Study
from headscope.results.study_tables import RunError
from headscope.results.sweep import KEY, RELABELLED, UNPRUNED, Sweep

METRICS = {"bleu": "BLEU", "perplexity": "perplexity", "accuracy": "accuracy"}
SAND = "#f6ecd2"  # not grey, which is for random choices
LOG_FROM = 8  # largest over smallest size, from which the axis is logarithmic
LOG_QUALITY_FROM = 20  # the same for perplexities
MAX_NOTES = 24
MAX_TRAJECTORIES = 12  # panels of a figure
MAX_GROUPS = 3  # curves of a panel; more layers are put into groups
SHADES = ("#0072b2", "#e69f00", "#009e73")
SEVERAL, NONE = "several functions", "no function found"
COLORS = {SEVERAL: "#555555", NONE: "#d9d9d9"}
KINDS = {"functions": "before", RELABELLED: "after"}
"""Columns of survivors.csv with functions: in the unpruned model, and in the pruned model."""
SEEDS = dict.fromkeys(("sites", "layers"), "mean over seeds; band: lowest to highest")
SEEDS["quality"] = "line: mean over seeds; small dots: seeds; band: lowest to highest"
Methods = list[tuple[Sweep, str, pd.DataFrame]]


@dataclass(frozen=True)
class PruningFigureOptions:
    """Options of the figure."""

    figure: Literal["quality", "sites", "layers", "functions", "gates"] | None = option(
        None, "What is drawn against heads kept; default: quality for sweeps, else sites, or layers of a single site."
    )
    functions: Path | None = option(None, "A run of `headscope analyze` that labels the heads.", metavar="RUN")


def draw_pruning(runs: Sequence[Sweep], sheet: Sheet, options: PruningFigureOptions) -> None:
    """Quality, sites, layers, functions or gates; RunError if the runs lack the requested data."""
    where = "sites" if any(len(run.sites) > 1 for run in runs) else "layers"
    kind = options.figure or ("quality" if any(run.has_quality for run in runs) else where)
    title, chart = FIGURES[kind]
    if options.functions:
        labels = Study.open(options.functions)
        runs = [run.with_labels(labels) for run in runs]
    charts = chart(runs, sheet)
    if not charts:
        raise RunError("there is no pruned model in these runs yet")
    if kind in SEEDS and any(run.cells.duplicated(KEY).any() for run in runs):  # some size has several seeds
        sheet.key(SEEDS[kind])
    draw_charts(sheet, charts, (26.0, 17.5))
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    counts = dict.fromkeys(f"{run.cells['of'].iloc[0]:.0f} heads ({' + '.join(run.sites)})" for run in runs)
    sheet.headline(title, f"{models} · {', '.join(counts)}")


def by_method(runs: Sequence[Sweep]) -> Methods:
    """Run, title and cells of each method; without controls, which keep the same heads as the cells they control."""
    groups = []
    for run in runs:
        plain = run.cells[(run.cells["control"] == "") & (run.cells["method"] != UNPRUNED)]
        for method, cells in plain.groupby("method", sort=False):
            groups.append((run, str(method) if len(runs) == 1 else f"{run.name}: {method}", cells))
    return groups


def chart_quality(runs: Sequence[Sweep], sheet: Sheet) -> list[Chart]:
    """The metric and the loss against the heads that stay: a line a method, its seeds as a band and as dots."""
    sweeps = [run for run in runs if run.has_quality]
    if not sweeps:
        raise RunError(f"these runs have no numbers of quality; {flag.figure} quality is for `headscope prune sweep`")
    sizes = sorted({round(count) for run in sweeps for name in ("kept", "of") for count in run.cells[name]})
    by_perplexity = [run for run in sweeps if (run.cells["metric"] == "perplexity").all()]
    numbers = [
        part for run in by_perplexity for part in (run.cells["value"], run.unpruned["low"], run.unpruned["high"])
    ]
    low, high = (float(end(np.concatenate(numbers))) if numbers else 0.0 for end in (np.nanmin, np.nanmax))
    is_logarithmic = 0 < low < high / LOG_QUALITY_FROM and math.isfinite(high)
    charts = []
    for run in sweeps:
        metric, prefix = str(run.cells["metric"].iloc[0]), f"{run.name}: " * (len(sweeps) > 1)
        columns = {"value": METRICS.get(metric, metric)}
        if metric != "perplexity":
            columns["loss"] = "loss (nats per token)"
        for column, label in columns.items():
            log_limits = (low, high) if is_logarithmic and metric == "perplexity" and column == "value" else None
            draw = partial(_plot_quality, run, column, sizes, log_limits)
            charts.append(Chart(prefix + label, draw, "heads kept", label))
        sheet.key(*(prefix + line.split(";")[0] for line in run.record.get("conclusions", [])[:MAX_NOTES]))
    return charts


def _plot_quality(
    run: Sweep, column: str, sizes: Sequence[int], log_limits: tuple[float, float] | None, axes: Axes
) -> None:
    """Draw a column of a sweep against the heads kept; `log_limits`: the perplexities of a logarithmic axis."""
    unpruned = run.unpruned.head(1)
    for _, row in unpruned.iterrows():
        axes.axhline(row[column], color=INK, linestyle=":", zorder=1, label="unpruned")
        if column == "value" and pd.notna(row["low"]):
            interval = "its 95 % interval over sentences"
            axes.axhspan(row["low"], row["high"], color=SAND, linewidth=0, zorder=0, label=interval)
    pruned = run.cells[run.cells["method"] != UNPRUNED]
    for (method, control), cells in pruned.groupby(["method", "control"], sort=False):
        look = method_style(str(method))
        looks = {"linestyle": "--", "marker": "o", "markerfacecolor": "white"} if control else {"marker": look.mark}
        label = "the same heads per layer, trained from scratch" if control else str(method)
        is_complete = control or (cells["kept"] >= cells["of"]).any()  # else the curve begins at the unpruned model
        curve = cells if is_complete else pd.concat([cells, unpruned])
        draw_sizes(axes, curve, "kept", column, look.color, label=label, zorder=4, **looks)
        if cells.duplicated("size").any():
            axes.scatter(cells["kept"], cells[column], s=3, color=look.color, alpha=0.6, linewidth=0, zorder=3)
    if sizes[0] > 0 and sizes[-1] / sizes[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
        axes.xaxis.set_major_formatter(FuncFormatter(short_number))
        axes.xaxis.set_minor_locator(NullLocator())
    else:
        edge = 0.04 * (sizes[-1] - sizes[0]) or 0.5
        axes.set_xlim(sizes[0] - edge, sizes[-1] + edge)
    if log_limits is not None:
        axes.set_yscale("log")
        axes.set_ylim(log_limits[0] / 1.3, log_limits[1] * 1.3)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.yaxis.set_major_formatter(FuncFormatter(short_number))
        axes.yaxis.set_minor_locator(NullLocator())


def draw_sizes(axes: Axes, cells: pd.DataFrame, x: str, column: str, color: str, **look: Any) -> None:
    """Draw the mean of a column at every size against the column `x`, with a band over seeds (lowest to highest)."""
    columns = {"x": (x, "mean"), "mean": (column, "mean"), "low": (column, "min"), "high": (column, "max")}
    sizes = cells.groupby("size", sort=False).agg(**columns).sort_values("x")
    low, high = (sizes["low"], sizes["high"]) if len(cells) > len(sizes) else (None, None)
    draw_curve(axes, sizes["x"], sizes["mean"], color, low=low, high=high, **look)


def chart_gates(runs: Sequence[Sweep], sheet: Sheet) -> list[Chart]:
    """The probability that a gate is open, during training; of a sweep the first seed of each size."""
    charts = []
    for run, title, cells in by_method(runs):
        for size, gated in cells[cells["cell"].isin(set(run.gates))].groupby("size", sort=False):
            draw = partial(_plot_gates, run, str(gated["cell"].iloc[0]))
            charts.append(Chart(f"{title}, {size}", draw, "update", "probability of being open"))
    if not charts:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    sheet.key(stroke(INK, "a head", linewidth=0.5))
    if len(charts) > MAX_TRAJECTORIES:
        sheet.key(f"{len(charts) - MAX_TRAJECTORIES} more sizes are not shown")
    return charts[:MAX_TRAJECTORIES]


def _plot_gates(run: Sweep, cell: str, axes: Axes) -> None:
    wide = run.trajectory(cell).pivot(index="update", columns=["site", "layer", "head"], values="open")
    for site in [site for site in SITE_COLORS if site in wide.columns.levels[0]]:  # type: ignore[attr-defined]
        gates, color = wide[[site]], SITE_COLORS[site]
        axes.plot(gates.index, gates, color=color, linewidth=0.5, alpha=0.45)
        axes.plot(gates.index, gates.mean(axis=1), color=color, linewidth=1.8, label=f"{site}, mean")
    axes.set_ylim(-0.03, 1.03)


def chart_sites(runs: Sequence[Sweep], sheet: Sheet) -> list[Chart]:
    """Heads that stay at each site against all that are pruned, a panel a method (Voita et al. 2019, figure 9)."""
    charts = []
    for run, title, cells in by_method(runs):
        table = pd.concat([run.unpruned, cells])
        table = table.assign(pruned=table["of"] - table["kept"]).rename(columns=lambda name: name.removeprefix("kept_"))
        draw = partial(_plot_curves, table, {site: SITE_COLORS[site] for site in run.sites}, int(table["of"].max()))
        charts.append(Chart(title, draw, "heads pruned in all", "heads kept", (True, True)))
    return charts


def chart_layers(runs: Sequence[Sweep], sheet: Sheet) -> list[Chart]:
    """Heads that stay in thirds of the layers of each site, against all pruned there (Voita et al. 2019, figure 10)."""
    charts, groups = [], by_method(runs)
    for run, title, cells in groups:
        if run.unpruned.empty:
            raise RunError(f"{run.name} does not have the unpruned model, whose layers are divided, yet; finish it")
        for site in run.sites:
            heads = run.survivors[run.survivors["site"] == site]
            table, limit = pd.concat([run.unpruned, cells]), int(run.unpruned[f"kept_{site}"].max())
            table = table.assign(pruned=limit - table[f"kept_{site}"])
            numbers = np.unique(heads.loc[heads["cell"].isin(run.unpruned["cell"]), "layer"])
            colors = {}
            for part, color in zip(np.array_split(numbers, min(MAX_GROUPS, len(numbers))), SHADES, strict=False):
                name = f"layer {part[0]}" if len(part) == 1 else f"layers {part[0]} to {part[-1]}"
                table[name] = table["cell"].map(heads[heads["layer"].isin(part)].groupby("cell").size()).fillna(0)
                colors[name] = color
            panel_title = f"{title}, {site}" if len(groups) > 1 else site
            draw = partial(_plot_curves, table, colors, limit)
            charts.append(Chart(panel_title, draw, "heads of the site pruned", "heads kept", (True, True)))
    return charts


def _plot_curves(cells: pd.DataFrame, columns: Mapping[str, str], limit: int, axes: Axes) -> None:
    """Draw columns of cells, each in its colour, against the number of heads `pruned`, up to `limit`."""
    for column, color in columns.items():
        draw_sizes(axes, cells, "pruned", column, color, label=column, marker="o")
    axes.set_xlim(-0.02 * limit, 1.02 * limit)
    axes.update_datalim([(0, 0)])


def chart_functions(runs: Sequence[Sweep], sheet: Sheet) -> list[Chart]:
    """Surviving functions: a bar a size, a part a function (Voita et al. 2019, figure 8)."""
    with_labels = [run for run in runs if "functions" in run.survivors]
    if not with_labels:
        raise RunError(f"functions of these heads are unknown; give {flag.functions} RUN of `headscope analyze`")
    is_relabelled = any(RELABELLED in run.survivors for run in with_labels)
    charts = []
    for run, title, cells in by_method(with_labels):
        for column, kind in KINDS.items():
            if column in run.survivors:
                panel_title = title + (f", {kind}" if RELABELLED in run.survivors else "")
                draw = partial(_stack_functions, function_counts(run, cells, column))
                charts.append(Chart(panel_title, draw, "heads kept", "heads", (False, True)))
    whose = "before: functions in the unpruned model; after: in the pruned model itself"
    sheet.key(f"{whose if is_relabelled else 'functions are those in the unpruned model'}; mean over seeds")
    return charts


def function_counts(run: Sweep, pruned: pd.DataFrame, column: str = "functions") -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller."""
    kinds = run.survivors.assign(kind=run.survivors[column].map(kind_of))
    cells = pd.concat([run.unpruned, pruned])
    sizes = cells.groupby("size", sort=False).agg(heads=("kept", "mean"), cells=("cell", "size"))
    with_sizes = kinds.drop(columns="size").merge(cells[["cell", "size"]], on="cell")
    table = with_sizes.groupby(["size", "kind"]).size().unstack(fill_value=0).reindex(sizes.index)
    table = table.div(sizes["cells"], axis=0).set_index(pd.Index(sizes["heads"]))
    table = table.sort_index(ascending=False, kind="stable")
    order = [*head_functions(), *sorted(set(table.columns) - {*head_functions(), *COLORS}), *COLORS]
    return table[[name for name in order if name in table]]


def kind_of(labels: object) -> str:
    """The kind of function that a head has; `SEVERAL` or `NONE` if it is not exactly one."""
    families = list(dict.fromkeys(function.family.name for function in functions_of(labels)))
    return families[0] if len(families) == 1 else SEVERAL if families else NONE


def _stack_functions(counts: pd.DataFrame, axes: Axes) -> None:
    colors = {name: family.color for name, family in head_functions().items()} | COLORS
    parts = {str(name): (colors.get(str(name), "#999999"), counts[name].to_numpy()) for name in counts}
    draw_bars(axes, range(len(counts)), parts)
    step = -(-len(counts) // 12)
    axes.set_xticks(range(0, len(counts), step), [f"{heads:.3g}" for heads in counts.index[::step]])
    axes.grid(visible=False, axis="x")


FIGURES: Mapping[str, tuple[str, Callable[[Sequence[Sweep], Sheet], list[Chart]]]] = {
    "quality": ("What pruning costs", chart_quality),
    "sites": ("Where the heads that stay are", chart_sites),
    "layers": ("In which layers the heads that stay are", chart_layers),
    "functions": ("Which functions survive", chart_functions),
    "gates": ("Gates while they learn", chart_gates),
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
