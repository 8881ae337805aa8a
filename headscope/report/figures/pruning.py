"""Figures of pruning runs: quality, heads kept per site, functions of the heads kept, and gates during training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from headscope.config import option
from headscope.engine.declarations import head_functions
from headscope.errors import ConfigError
from headscope.report.layout.families import functions_of
from headscope.report.layout.legend import SITE_COLORS as SITES
from headscope.report.layout.legend import Entry, Legend, method_entries, method_style
from headscope.report.layout.page import INK, TICK, Page, Swatch, even_width, flow, text_width
from headscope.report.layout.panels import chart, share_limits
from headscope.report.layout.style import panel_width, widest
from headscope.report.readers.pruning_runs import UNPRUNED, PruningRun, with_labels
from headscope.report.readers.run import RunError
from headscope.report.registry import PlotFigure, Source

WIDTH, HEIGHT = 2.6, 1.75  # inches of the axes of one panel
LEFT, ABOVE, BELOW, GAP = 0.52, 0.24, 0.36, (0.25, 0.12)
WIDEST = 10.0
METRICS = {"bleu": "BLEU", "perplexity": "perplexity", "accuracy": "accuracy"}
SEVERAL, NONE = "several functions", "no function found"
SEVERAL_COLOR = "#555555"
SAND = "#f6ecd2"  # grey is of random choices
MOST = 12  # trajectories in one figure
TICK_ROOM = 0.26  # inches that the number below a bar takes
LOG_FROM = 8  # sizes that span this factor are set on a logarithmic axis


@dataclass(frozen=True)
class PruningOptions:
    """Options of the figure."""

    figure: str | None = option(
        None,
        "quality: metric against heads kept; sites: heads kept at each site; functions: of the survivors; "
        "gates: while they learn. Default: quality for sweeps, sites for other runs.",
        metavar="quality|sites|functions|gates",
    )
    functions: Path | None = option(None, "A run of `headscope analyze` that labels the heads.", metavar="RUN")


@dataclass(frozen=True)
class PruningPanel:
    """Axes of one kind: the title, what draws into them, and what stands beside the axes with which unit.

    Panels with the same `ylabel` have the same limits.
    """

    title: str
    draw: Callable[[Axes], None]
    xlabel: str
    ylabel: str


def pruning_figure(runs: Sequence[PruningRun], figure: str | None = None, *, functions: Path | None = None) -> Figure:
    """One of the figures: quality, sites, functions or gates; None is quality for sweeps, sites for other runs.

    `functions` is a run of `analyze` that labels heads. ConfigError for an unknown name; RunError where the runs lack
    what the figure shows.
    """
    kind = figure or ("quality" if any(run.measured for run in runs) else "sites")
    if kind not in FIGURES:
        raise ConfigError(f"--figure {kind!r} is not known; choose from {', '.join(FIGURES)}")
    title, make = FIGURES[kind]
    runs = with_labels(runs, functions) if functions else runs
    panels, legend = make(runs)
    return _page(runs, title, panels, legend)


def _page(runs: Sequence[PruningRun], title: str, panels: Sequence[PruningPanel], entries: Sequence[Entry]) -> Figure:
    wide = panel_width(WIDTH, len(panels), left=LEFT, gap=GAP[0], most=WIDEST)
    box = (LEFT + wide, ABOVE + HEIGHT + BELOW)
    laid = flow([box] * len(panels), even_width(len(panels), box[0], widest(WIDEST), gap=GAP[0]), gap=GAP)
    legend = Legend.plan(entries, widest(max(laid.width, 4.6)))
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    counts = ", ".join(dict.fromkeys(f"{run.cells['of'].iloc[0]:.0f} heads ({' + '.join(run.sites)})" for run in runs))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title=title,
        subtitle=f"{models} · {counts}",
        footer="\n".join(str(run.meta.get("signature", "")) for run in runs),
    )
    drawn: dict[str, list[Axes]] = {}
    for panel, (left, top) in zip(panels, laid.corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, wide, HEIGHT)
        chart(axes, title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel, width=wide)
        panel.draw(axes)
        drawn.setdefault(panel.ylabel, []).append(axes)
    for alike in drawn.values():
        if alike[0].get_autoscaley_on():
            share_limits(alike)
    legend.draw(page, laid.height)
    return page.finished()


# Quality.


def _quality(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """The metric and the loss against the heads that stay: a line a method, its seeds as a band and as dots.

    Every line begins at the model with all heads.
    """
    measured = [run for run in runs if run.measured]
    if not measured:
        raise RunError("these runs have no numbers of quality; --figure quality is for `headscope prune sweep`")
    methods = dict.fromkeys(str(name) for run in measured for name in run.cells["method"] if name != UNPRUNED)
    sizes = sorted({round(count) for run in measured for name in ("kept", "of") for count in run.cells[name]})
    panels = []
    for run in measured:
        metric = str(run.cells["metric"].iloc[0])
        columns = {"value": METRICS.get(metric, metric)} | (
            {} if metric == "perplexity" else {"loss": "loss (nats per token)"}
        )
        for column, label in columns.items():
            title = label if len(measured) == 1 else f"{run.name}: {label}"
            draw = _quality_panel(run, column, sizes)
            panels.append(PruningPanel(title, draw, "heads kept", label))
    entries = method_entries(list(methods))
    if any((run.cells["control"] != "").any() for run in measured):
        entries.append((Swatch("--", "o", filled=False), INK, "the same heads per layer, trained from scratch"))
    if any(run.cells.duplicated(["method", "control", "size"]).any() for run in measured):
        entries.append(("", "", "line: mean over seeds; small dots: seeds; band: lowest to highest"))
    entries.append((Swatch(":"), INK, "unpruned"))
    if any(run.cells.loc[run.cells["method"] == UNPRUNED, "low"].notna().any() for run in measured):
        entries.append((Swatch(band=True), SAND, "its 95 % interval over sentences"))
    entries += [
        ("", "", note if len(measured) == 1 else f"{run.name}: {note}") for run in measured for note in run.notes
    ]
    return panels, entries


def _quality_panel(run: PruningRun, column: str, sizes: Sequence[int]) -> Callable[[Axes], None]:
    cells = run.cells

    def draw(axes: Axes) -> None:
        unpruned = cells[cells["method"] == UNPRUNED]
        for _, row in unpruned.head(1).iterrows():
            axes.axhline(row[column], color=INK, lw=1, ls=":", zorder=1)
            if column == "value" and pd.notna(row["low"]):
                axes.axhspan(row["low"], row["high"], color=SAND, lw=0, zorder=0)
        for (_, control), pruned in cells[cells["method"] != UNPRUNED].groupby(["method", "control"], sort=False):
            _line(axes, pruned, unpruned.head(1), column, dashed=bool(control))
        _size_axis(axes, sizes)

    return draw


def _line(axes: Axes, cells: pd.DataFrame, unpruned: pd.DataFrame, column: str, *, dashed: bool) -> None:
    """A method from the unpruned model on; a control, or a method that was tried with all heads too, from there."""
    look = method_style(str(cells["method"].iloc[0]))
    color = look.color
    whole = dashed or (cells["kept"] >= cells["of"]).any()
    by_size = (
        pd.concat([cells, *([] if whole else [unpruned])])
        .groupby("size", sort=False)
        .agg(kept=("kept", "mean"), mean=(column, "mean"), low=(column, "min"), high=(column, "max"))
    )
    by_size = by_size.sort_values("kept")
    style = "--" if dashed else "-"
    fill = "white" if dashed else color
    mark = "o" if dashed else look.mark
    axes.plot(
        by_size["kept"], by_size["mean"], style, color=color, lw=1.2, marker=mark, ms=3.2, mfc=fill, mew=0.8, zorder=4
    )
    if cells.duplicated("size").any():
        axes.fill_between(by_size["kept"], by_size["low"], by_size["high"], color=color, alpha=0.15, lw=0, zorder=2)
        axes.scatter(cells["kept"], cells[column], s=3, color=color, alpha=0.6, lw=0, zorder=3)


def _size_axis(axes: Axes, sizes: Sequence[int]) -> None:
    """Heads that stay, logarithmic where the sizes span much; ticks at sizes that do not touch each other."""
    if sizes[0] > 0 and sizes[-1] / sizes[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    else:
        edge = 0.04 * (sizes[-1] - sizes[0]) or 0.5
        axes.set_xlim(sizes[0] - edge, sizes[-1] + edge)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(_apart(axes, sizes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _apart(axes: Axes, sizes: Sequence[int]) -> list[int]:
    """Sizes whose labels have room, from the largest down."""
    low, high = axes.transData.transform([(min(sizes), 0), (max(sizes), 0)])[:, 0]
    chosen: list[int] = []
    for size in reversed(sizes):
        x = axes.transData.transform((size, 0))[0]
        reach = text_width(str(size), TICK) * axes.figure.dpi + 3
        if all(abs(x - axes.transData.transform((label, 0))[0]) > reach for label in chosen) or high == low:
            chosen.append(size)
    return chosen


# Sites.


def _sites(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """Heads that stay at each site against all that are pruned, a panel a method (Voita et al. 2019, figure 9)."""
    panels = []
    for run, method, cells in _by_method(runs):
        unpruned = run.cells[run.cells["method"] == UNPRUNED]
        draw = _sites_panel(run, pd.concat([unpruned, cells]))
        panels.append(PruningPanel(_named(runs, run, method), draw, "heads pruned in all", "heads kept"))
    if not panels:
        raise RunError("there is no pruned model in these runs yet")
    sites = [site for site in SITES if any(site in run.sites for run in runs)]
    entries: list[Entry] = [(Swatch(mark="o"), SITES[site], site) for site in sites]
    if any(run.cells.duplicated(["method", "control", "size"]).any() for run in runs):
        entries.append(("", "", "mean over seeds; band: lowest to highest"))
    return panels, entries


def _sites_panel(run: PruningRun, cells: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        pruned = (cells["of"] - cells["kept"]).rename("pruned")
        for site in run.sites:
            column = f"kept_{site}"
            by_size = cells.assign(pruned=pruned).groupby("size", sort=False).agg(
                pruned=("pruned", "mean"), mean=(column, "mean"), low=(column, "min"), high=(column, "max")
            )  # fmt: skip
            by_size = by_size.sort_values("pruned")
            axes.plot(by_size["pruned"], by_size["mean"], color=SITES[site], lw=1.2, marker="o", ms=3)
            if len(cells) > len(by_size):
                axes.fill_between(
                    by_size["pruned"], by_size["low"], by_size["high"], color=SITES[site], alpha=0.15, lw=0
                )
        axes.set_xlim(-0.02 * float(cells["of"].max()), 1.02 * float(cells["of"].max()))
        axes.update_datalim([(0, 0)])
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw


def _by_method(runs: Sequence[PruningRun]) -> list[tuple[PruningRun, str, pd.DataFrame]]:
    """Cells by run and method, without controls, which have the heads of the cells they control."""
    groups = []
    for run in runs:
        plain = run.cells[(run.cells["control"] == "") & (run.cells["method"] != UNPRUNED)]
        groups += [(run, str(method), cells) for method, cells in plain.groupby("method", sort=False)]
    return groups


def _named(runs: Sequence[PruningRun], run: PruningRun, method: str) -> str:
    return method if len(runs) == 1 else f"{run.name}: {method}"


# Functions.


def _functions(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """Which functions survive: a bar a size, a part a function (Voita et al. 2019, figure 8)."""
    labelled = [run for run in runs if "functions" in run.survivors]
    if not labelled:
        raise RunError("functions of these heads are not known; give --functions RUN, a run of `headscope analyze`")
    panels = []
    colors: dict[str, str] = {}
    for run, method, cells in _by_method(labelled):
        if run.labelled and not cells["cell"].isin(run.survivors["cell"]).any():
            continue
        counts = function_counts(run, cells)
        colors |= {name: _color(name) for name in counts.columns if counts[name].any()}
        panels.append(PruningPanel(_named(labelled, run, method), _functions_panel(counts), "heads kept", "heads"))
    if not panels:
        raise RunError("--functions RUN has labels of other heads than any of these models; name a run on one of them")
    order = [*head_functions(), *sorted(set(colors) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    entries: list[Entry] = [("    ", colors[name], name) for name in order if name in colors]
    whose = ", ".join(dict.fromkeys(run.labelled or "the unpruned model" for run in labelled))
    return panels, [*entries, ("", "", f"functions are those of {whose}; mean over seeds")]


def function_counts(run: PruningRun, pruned: pd.DataFrame) -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller."""
    kinds = run.survivors.assign(kind=[run_kind(labels) for labels in run.survivors["functions"]])
    unpruned = run.cells[run.cells["method"] == UNPRUNED]
    if run.labelled:  # of one pruned model: nothing is known of other heads
        unpruned, pruned = (cells[cells["cell"].isin(kinds["cell"])] for cells in (unpruned, pruned))
    rows = {}
    for _, cells in [*unpruned.groupby("size", sort=False), *pruned.groupby("size", sort=False)]:
        survivors = kinds[kinds["cell"].isin(cells["cell"])]
        heads, size = float(cells["kept"].mean()), str(cells["size"].iloc[0])
        rows[(heads, size)] = survivors["kind"].value_counts() / len(cells)
    order = sorted(rows, key=lambda row: -row[0])
    table = pd.DataFrame([rows[row] for row in order], index=pd.Index([heads for heads, _ in order])).fillna(0.0)
    names = [*head_functions(), *sorted(set(table.columns) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    return table[[name for name in names if name in table]]


def run_kind(labels: object) -> str:
    """The one kind of function that a head has, or that it has several or none."""
    families = list(dict.fromkeys(function.family.name for function in functions_of(labels)))
    return families[0] if len(families) == 1 else SEVERAL if families else NONE


def _color(name: str) -> str:
    if known := head_functions().get(name):
        return known.color
    return {SEVERAL: SEVERAL_COLOR, NONE: "#d9d9d9"}.get(name, "#999999")


def _functions_panel(counts: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        positions = list(range(len(counts)))
        bottom = pd.Series(0.0, index=range(len(counts)))
        for name in counts:
            heights = counts[name].reset_index(drop=True)
            axes.bar(
                positions, heights, bottom=bottom, width=0.8, color=_color(str(name)), edgecolor="white", linewidth=0.4
            )
            bottom = bottom + heights
        labels = [f"{heads:.3g}" for heads in counts.index]
        room = axes.get_window_extent().width / axes.figure.dpi
        step = max(1, -(-len(labels) // max(int(room / TICK_ROOM), 1)))
        axes.set_xticks(positions[::step], labels[::step])
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(visible=False, axis="x")

    return draw


# Gates.


def _gates(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
    """How open every gate is while gates learn; of a sweep the first seed of each size."""
    panels: list[PruningPanel] = []
    sites: dict[str, None] = {}
    hidden = 0
    for run in runs:
        gated = run.cells[run.cells["cell"].isin(set(run.gates)) & (run.cells["control"] == "")]
        for (method, size), cells in gated.groupby(["method", "size"], sort=False):
            if len(panels) == MOST:
                hidden += 1
                continue
            name = str(cells["cell"].iloc[0])
            table = run.trajectory(name)
            sites |= dict.fromkeys(table["site"])
            title = _named(runs, run, f"{method}, {size}")
            panels.append(PruningPanel(title, _gates_panel(table), "update", "probability of being open"))
    if not panels:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    entries: list[Entry] = [(Swatch(width=1.8), SITES[site], f"{site}, mean") for site in SITES if site in sites]
    entries += [(Swatch(width=0.5), INK, "a head")]
    return panels, [*entries, *([("", "", f"{hidden} more sizes are not shown")] if hidden else [])]


def _gates_panel(table: pd.DataFrame) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        wide = table.pivot(index="update", columns=["site", "layer", "head"], values="open")
        for site in [site for site in SITES if site in set(table["site"])]:
            gates = wide[[site]]
            axes.plot(gates.index, gates, color=SITES[site], lw=0.5, alpha=0.45)
            axes.plot(gates.index, gates.mean(axis=1), color=SITES[site], lw=1.8)
        axes.set_ylim(-0.03, 1.03)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))

    return draw


Made = tuple[list[PruningPanel], list[Entry]]
FIGURES: Mapping[str, tuple[str, Callable[[Sequence[PruningRun]], Made]]] = {
    "quality": ("What pruning costs", _quality),
    "sites": ("Where the heads that stay are", _sites),
    "functions": ("Which functions survive", _functions),
    "gates": ("Gates while they learn", _gates),
}


PRUNING = PlotFigure(
    "pruning",
    "What pruning costs, where the heads that stay are, which functions survive, and how gates learnt.",
    pruning_figure,
    Options=PruningOptions,
    source=Source(
        "SWEEP|RUN",
        "Directories that `headscope prune sweep`, `l0`, `subset` or `rank` wrote.",
        "headscope.report.readers.pruning_runs:load_pruned",
        at_once=True,
    ),
    runs="together",
    order=500,
)
