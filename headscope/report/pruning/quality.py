"""Quality against the heads that stay, a line a method; and which functions survive, a bar a size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator

from headscope.config.declarations import head_functions
from headscope.report.layout.legend import Entry, functions_of, method_entries, method_style
from headscope.report.layout.page import INK, TICK, Swatch, text_width
from headscope.report.layout.panels import short_number
from headscope.report.pruning.heads import Made, PruningPanel, by_method, named
from headscope.report.readers.pruning_runs import RELABELLED, UNPRUNED, PruningRun
from headscope.results.study_tables import RunError

METRICS = {"bleu": "BLEU", "perplexity": "perplexity", "accuracy": "accuracy"}
SAND = "#f6ecd2"  # grey is of random choices

LOG_FROM = 8  # sizes that span this factor are set on a logarithmic axis
LOG_QUALITY_FROM = 20  # and so are perplexities that span this one


def quality(runs: Sequence[PruningRun]) -> tuple[list[PruningPanel], list[Entry]]:
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
            perplexities = _span(measured) if metric == "perplexity" and column == "value" else None
            draw = _quality_panel(run, column, sizes, perplexities)
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


def _span(runs: Sequence[PruningRun]) -> tuple[float, float] | None:
    """Lowest and highest perplexity of all runs, and of the unpruned model's interval, if a linear axis hides some."""
    cells = pd.concat([run.cells for run in runs if (run.cells["metric"] == "perplexity").all()])
    unpruned = cells[cells["method"] == UNPRUNED]
    drawn = pd.concat([cells["value"], unpruned["low"], unpruned["high"]])
    low, high = float(drawn.min()), float(drawn.max())
    return (low, high) if 0 < low < high / LOG_QUALITY_FROM and math.isfinite(high) else None


def _quality_panel(
    run: PruningRun, column: str, sizes: Sequence[int], perplexities: tuple[float, float] | None
) -> Callable[[Axes], None]:
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
        if perplexities is not None:
            low, high = perplexities
            axes.set_yscale("log")
            axes.set_ylim(low / 1.3, high * 1.3)
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
            axes.yaxis.set_major_formatter(FuncFormatter(short_number))
            axes.yaxis.set_minor_locator(NullLocator())

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
    low, high = axes.transData.transform([(min(sizes), 0), (max(sizes), 0)])[:, 0]
    chosen: list[int] = []
    for size in reversed(sizes):
        x = axes.transData.transform((size, 0))[0]
        reach = text_width(str(size), TICK) * axes.figure.dpi + 3
        if all(abs(x - axes.transData.transform((label, 0))[0]) > reach for label in chosen) or high == low:
            chosen.append(size)
    axes.xaxis.set_major_locator(FixedLocator(chosen))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


SEVERAL, NONE = "several functions", "no function found"
SEVERAL_COLOR = "#555555"
KINDS = {"functions": "before", RELABELLED: "after"}
"""Columns of the survivors with functions: those that heads had, and those that they have."""
TICK_ROOM = 0.26  # inches that the number below a bar takes


def functions_kept(runs: Sequence[PruningRun]) -> Made:
    """Which functions survive: a bar a size, a part a function (Voita et al. 2019, figure 8).

    A panel a method; where a sweep looked at the functions anew (`--relabel`), a second one of those.
    """
    labelled = [run for run in runs if "functions" in run.survivors]
    if not labelled:
        raise RunError("functions of these heads are not known; give --functions RUN, a run of `headscope analyze`")
    if not by_method(labelled):
        raise RunError("there is no pruned model in these runs yet")
    panels = []
    colors: dict[str, str] = {}
    for run, method, cells in by_method(labelled):
        if run.labelled and not cells["cell"].isin(run.survivors["cell"]).any():
            continue
        for column, kind in KINDS.items():
            if column not in run.survivors:
                continue
            counts = function_counts(run, cells, column)
            colors |= {name: _color(name) for name in counts.columns if counts[name].any()}
            title = named(labelled, run, method) + (f", {kind}" if RELABELLED in run.survivors else "")
            panels.append(PruningPanel(title, _functions_panel(counts), "heads kept", "heads"))
    if not panels:
        raise RunError("--functions RUN has labels of other heads than any of these models; name a run on one of them")
    order = [*head_functions(), *sorted(set(colors) - {*head_functions(), SEVERAL, NONE}), SEVERAL, NONE]
    entries: list[Entry] = [("    ", colors[name], name) for name in order if name in colors]
    whose = ", ".join(dict.fromkeys(run.labelled or "the unpruned model" for run in labelled))
    if any(RELABELLED in run.survivors for run in labelled):
        entries.append(("", "", f"before: functions in {whose}; after: in the pruned model itself; mean over seeds"))
    else:
        entries.append(("", "", f"functions are those of {whose}; mean over seeds"))
    return panels, entries


def function_counts(run: PruningRun, pruned: pd.DataFrame, column: str = "functions") -> pd.DataFrame:
    """Heads by kind of function, each counted once: a row a size, the unpruned model first, then larger to smaller.

    `column` of the survivors has the functions.
    """
    kinds = run.survivors.assign(kind=[run_kind(labels) for labels in run.survivors[column]])
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
