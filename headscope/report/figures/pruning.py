"""Figures of pruning runs: quality, heads kept per site, functions of the heads kept, and gates during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from headscope.engine.declarations import head_functions
from headscope.errors import ConfigError
from headscope.report.figures.training import COLORS
from headscope.report.layout.families import Legend, functions_of
from headscope.report.layout.page import GREY, LABEL, PALE, RULE, TICK, Page, even_width, flow, shorten, text_width
from headscope.report.readers.pruning_runs import UNPRUNED, PruningRun
from headscope.report.readers.run import RunError

WIDTH, HEIGHT = 2.6, 1.75  # inches of the axes of one panel
LEFT, ABOVE, BELOW, GAP = 0.52, 0.24, 0.4, (0.25, 0.22)
WIDEST = 10.0
METRICS = {"bleu": "BLEU", "perplexity": "perplexity", "accuracy": "accuracy"}
SITES = {"encoder-self": "#0072b2", "decoder-self": "#d55e00", "cross": "#009e73"}
SEVERAL, NONE = "several functions", "no function found"
SEVERAL_COLOR = "#555555"
MOST = 12  # trajectories in one figure
LOG_FROM = 8  # sizes that span this factor are set on a logarithmic axis


@dataclass(frozen=True)
class PruningPanel:
    """Axes of one kind: the title, and what draws into them."""

    title: str
    draw: Callable[[Axes], None]


def pruning_figure(runs: Sequence[PruningRun], kind: str | None = None) -> Figure:
    """One of the figures: quality, sites, functions or gates; None is quality for sweeps, sites for other runs.

    ConfigError for an unknown name; RunError where the runs lack what the figure shows.
    """
    kind = kind or ("quality" if any(run.measured for run in runs) else "sites")
    if kind not in FIGURES:
        raise ConfigError(f"--figure {kind!r} is not known; choose from {', '.join(FIGURES)}")
    title, make = FIGURES[kind]
    panels, legend = make(runs)
    return _page(runs, title, panels, legend)


def _page(
    runs: Sequence[PruningRun], title: str, panels: Sequence[PruningPanel], entries: Sequence[tuple[str, str, str]]
) -> Figure:
    box = (LEFT + WIDTH, ABOVE + HEIGHT + BELOW)
    laid = flow([box] * len(panels), even_width(len(panels), box[0], WIDEST, gap=GAP[0]), gap=GAP)
    legend = Legend.plan(entries, max(laid.width, 4.6))
    models = ", ".join(dict.fromkeys(run.model for run in runs))
    counts = ", ".join(dict.fromkeys(f"{_total(run)} heads ({' + '.join(run.sites)})" for run in runs))
    page = Page(
        laid.width,
        laid.height + legend.height,
        title=title,
        subtitle=f"{models} · {counts}",
        footer="\n".join(str(run.meta.get("signature", "")) for run in runs),
    )
    for panel, (left, top) in zip(panels, laid.corners, strict=True):
        axes = page.axes(left + LEFT, top + ABOVE, WIDTH, HEIGHT)
        panel.draw(axes)
        axes.set_title(
            shorten(panel.title, WIDTH, LABEL * 1.08), size=LABEL, loc="left", pad=4, weight="bold", parse_math=False
        )
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(length=1.5, width=0.4, color=RULE)
    legend.draw(page, laid.height)
    return page.figure


def _total(run: PruningRun) -> int:
    return int(run.cells["of"].iloc[0])


# Quality.


def _quality(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[tuple[str, str, str]]]:
    """The metric and the loss against the heads that stay: a line a method, its seeds as a band and as dots."""
    measured = [run for run in runs if run.measured]
    if not measured:
        raise RunError("these runs have no numbers of quality; --figure quality is for `headscope prune sweep`")
    colors = _colors(measured)
    panels = []
    for run in measured:
        metric = str(run.cells["metric"].iloc[0])
        columns = {"value": METRICS.get(metric, metric)} | ({} if metric == "perplexity" else {"loss": "loss (nats)"})
        for column, label in columns.items():
            title = label if len(measured) == 1 else f"{run.name}: {label}"
            panels.append(PruningPanel(title, _quality_panel(run, column, label, colors)))
    entries = [("    ", color, method) for method, color in colors.items()]
    if any((run.cells["control"] != "").any() for run in measured):
        entries.append(("– –", "", "the same heads per layer, trained from scratch"))
    entries.append(("——", "", "mean over seeds; dots: seeds; band: from the lowest to the highest"))
    entries.append(("····", "", "unpruned, with its 95 % interval"))
    entries += [
        ("", "", note if len(measured) == 1 else f"{run.name}: {note}") for run in measured for note in run.notes
    ]
    return panels, entries


def _colors(runs: Iterable[PruningRun]) -> dict[str, str]:
    methods = dict.fromkeys(str(name) for run in runs for name in run.cells["method"] if name != UNPRUNED)
    return {method: COLORS[number % len(COLORS)] for number, method in enumerate(methods)}


def _quality_panel(run: PruningRun, column: str, label: str, colors: Mapping[str, str]) -> Callable[[Axes], None]:
    cells = run.cells

    def draw(axes: Axes) -> None:
        unpruned = cells[cells["method"] == UNPRUNED]
        for _, row in unpruned.head(1).iterrows():
            axes.axhline(row[column], color=GREY, lw=1, ls=":", zorder=1)
            if column == "value" and pd.notna(row["low"]):
                axes.axhspan(row["low"], row["high"], color=PALE, lw=0, zorder=0)
        for (method, control), pruned in cells[cells["method"] != UNPRUNED].groupby(["method", "control"], sort=False):
            _line(axes, pruned, column, colors[str(method)], dashed=bool(control))
        _size_axis(axes, cells)
        axes.set_ylabel(label, size=TICK, labelpad=3)
        axes.yaxis.set_major_locator(MaxNLocator(5))

    return draw


def _line(axes: Axes, cells: pd.DataFrame, column: str, color: str, *, dashed: bool) -> None:
    by_size = cells.groupby("size", sort=False).agg(
        kept=("kept", "mean"), mean=(column, "mean"), low=(column, "min"), high=(column, "max")
    )
    by_size = by_size.sort_values("kept")
    style = "--" if dashed else "-"
    fill = "white" if dashed else color
    axes.plot(
        by_size["kept"], by_size["mean"], style, color=color, lw=1.2, marker="o", ms=3, mfc=fill, mew=0.8, zorder=4
    )
    if len(cells) > len(by_size):
        axes.fill_between(by_size["kept"], by_size["low"], by_size["high"], color=color, alpha=0.15, lw=0, zorder=2)
        axes.scatter(cells["kept"], cells[column], s=3, color=color, alpha=0.6, lw=0, zorder=3)


def _size_axis(axes: Axes, cells: pd.DataFrame) -> None:
    """Heads that stay, logarithmic where the sizes span much; ticks at sizes that do not touch each other."""
    sizes = sorted({round(count) for count in cells["kept"]} | {int(cells["of"].iloc[0])})
    if sizes[0] > 0 and sizes[-1] / sizes[0] >= LOG_FROM:
        axes.set_xscale("log", base=2)
        axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    else:
        edge = 0.04 * (sizes[-1] - sizes[0]) or 0.5
        axes.set_xlim(sizes[0] - edge, sizes[-1] + edge)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(FixedLocator(_apart(axes, sizes)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("heads kept", size=TICK, labelpad=2)


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


def _sites(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[tuple[str, str, str]]]:
    """Heads that stay at each site against all that are pruned, a panel a method (Voita et al. 2019, figure 9)."""
    panels = []
    for run, method, cells in _by_method(runs):
        unpruned = run.cells[run.cells["method"] == UNPRUNED]
        panels.append(PruningPanel(_named(runs, run, method), _sites_panel(run, pd.concat([unpruned, cells]))))
    if not panels:
        raise RunError("there is no pruned model in these runs yet")
    sites = [site for site in SITES if any(site in run.sites for run in runs)]
    return panels, [("    ", SITES[site], site) for site in sites]


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
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("heads pruned in all", size=TICK, labelpad=2)
        axes.set_ylabel("heads kept", size=TICK, labelpad=3)

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


def _functions(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[tuple[str, str, str]]]:
    """Which functions survive: a bar a size, a part a function (Voita et al. 2019, figure 8)."""
    labelled = [run for run in runs if "functions" in run.survivors]
    if not labelled:
        raise RunError("functions of these heads are not known; give --functions RUN, a run of `headscope analyze`")
    panels = []
    colors: dict[str, str] = {}
    for run, method, cells in _by_method(labelled):
        counts = function_counts(run, cells)
        colors |= {name: _color(name) for name in counts.columns if counts[name].any()}
        panels.append(PruningPanel(_named(labelled, run, method), _functions_panel(counts)))
    order = [*head_functions(), *sorted(set(colors) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    entries = [("    ", colors[name], name) for name in order if name in colors]
    return panels, [*entries, ("", "", "functions are those of the unpruned model; mean over seeds")]


def function_counts(run: PruningRun, pruned: pd.DataFrame) -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller."""
    kinds = run.survivors.assign(kind=[run_kind(labels) for labels in run.survivors["functions"]])
    unpruned = run.cells[run.cells["method"] == UNPRUNED]
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
        step = max(1, -(-len(labels) * 5 // 60))
        axes.set_xticks(positions[::step], labels[::step])
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.set_xlabel("heads kept", size=TICK, labelpad=2)
        axes.set_ylabel("heads", size=TICK, labelpad=3)

    return draw


# Gates.


def _gates(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[tuple[str, str, str]]]:
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
            panels.append(PruningPanel(_named(runs, run, f"{method}, {size}"), _gates_panel(table)))
    if not panels:
        raise RunError("no gates were learnt in these runs; l0 and subset write gates.csv")
    entries = [("    ", SITES[site], site) for site in SITES if site in sites]
    entries += [("——", "", "thin: a head; thick: mean of the site")]
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
        axes.set_xlabel("update", size=TICK, labelpad=2)
        axes.set_ylabel("probability of being open", size=TICK, labelpad=3)

    return draw


Made = tuple[list[PruningPanel], list[tuple[str, str, str]]]
FIGURES: Mapping[str, tuple[str, Callable[[Sequence[PruningRun]], Made]]] = {
    "quality": ("What pruning costs", _quality),
    "sites": ("Where the heads that stay are", _sites),
    "functions": ("Which functions survive", _functions),
    "gates": ("Gates while they learn", _gates),
}
