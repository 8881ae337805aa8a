"""How often a head's argmax is the syntactic partner: relations × heads, one panel a layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.report.layout.grid import draw_cells, tick_step
from headscope.report.layout.legend import Legend, contrast
from headscope.report.layout.output import widest
from headscope.report.layout.page import BAR, LABEL, TICK, Page, text_width
from headscope.report.layout.panels import Panels, shared_pitch
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

CLEAR = 0.10  # a head is syntactic where it beats the baseline by this much
MOST = 24  # rows of one panel; with more relations the clearest are shown
PITCH = 0.15
ABOVE, BELOW = 0.2, 0.36
GAP = 0.5  # columns between the baseline and the heads


def relation_accuracy(run: Study, *, most: int = MOST) -> Figure:
    """Accuracy of every head on every relation and direction, beside the best fixed offset's."""
    table = run.table("syntactic", "relation", "label", "count", "accuracy", "baseline", "margin")
    labels = chosen_labels(table, most)
    if not labels:
        raise MissingTable(f"run {run.name}: syntactic.csv holds no relation; analyse more sentences")
    left_out = table["label"].nunique() - len(labels)
    words = ("Accuracy of heads on syntactic relations", "accuracy")
    entries = [
        ("b", "", "baseline: the best fixed offset for the relation"),
        ("●", "", "head at least 10 points above the baseline, and labelled so"),
        ("○", "", "the same, but the label was withheld for lack of evidence (labels.csv)"),
        (">", "", "from head word to dependent (verb to subject)"),
        ("<", "", "from dependent to head word"),
    ]
    return _figure(run, table, labels, words, entries, note=f" · {left_out} rows not shown" if left_out else "")


def _figure(
    run: Study,
    table: pd.DataFrame,
    labels: list[str],
    words: tuple[str, str],
    entries: list[tuple[str, str, str]],
    *,
    note: str = "",
) -> Figure:
    """Labels × heads of every layer, with a title and a name of the shade in `words`."""
    heads = run.most_heads
    gutter = max(text_width(label, TICK) for label in labels) + 0.12
    counted, cells = set(zip(table["site"], table["layer"], strict=True)), 1 + GAP + heads
    pitch = shared_pitch(PITCH, cells, run, left=gutter + 0.1, most=13.9, besides=BAR, only=counted)
    size = (gutter + cells * pitch + 0.1, ABOVE + len(labels) * PITCH + BELOW)
    panels = Panels.plan(run, size, widest=widest(13.9, besides=BAR), only=counted)
    page_width = panels.flow.width + BAR
    legend = Legend.plan(entries, widest(page_width))
    page = Page(
        page_width,
        panels.flow.height + legend.height,
        title=words[0],
        subtitle=f"{run.model} · {run.data}{note}",
        footer=run.signature,
    )
    norm = Normalize(0, 1)
    for panel, (left, top) in panels:
        site, layer, count = panel
        wide = (1 + GAP + count) * pitch
        axes = panels.axes(page, panel, left + gutter, top + ABOVE, wide, len(labels) * PITCH)
        rows = table[(table["site"] == site) & (table["layer"] == layer)]
        _draw(axes, rows, labels, (count, pitch), norm, _supported(run, site, layer))
    bar = ScalarMappable(norm, "Blues")
    height = min(len(labels) * PITCH, 2.0)
    page.color_bar(panels.flow.width + 0.08, ABOVE, height, bar, label=words[1])
    legend.draw(page, panels.flow.height)
    return page.finished()


def aligned_words(run: Study) -> Figure:
    """How often every cross head looks at the word that is aligned with the predicted, the fed and the next one."""
    table = run.table("alignment", "relation", "share", "baseline_diagonal")
    table = table.rename(columns={"relation": "label", "share": "accuracy", "baseline_diagonal": "baseline"})
    words = ("Share of positions at which cross heads look at the aligned word", "share")
    entries = [
        ("b", "", "baseline: the key on the diagonal"),
        ("fed", "", "the word that the position reads; predicted and next: the one and the two after"),
    ]
    return _figure(run, table.assign(margin=np.nan), ["predicted", "fed", "next"], words, entries)


def chosen_labels(table: pd.DataFrame, most: int) -> list[str]:
    """All labels as the table orders them; more than `most`: those with the largest margin of any head."""
    labels = [str(label) for label in table["label"].unique()]
    if len(labels) <= most:
        return labels
    best = table.groupby("label")["margin"].max().sort_values(ascending=False, kind="stable")
    shown = set(best.index[:most])
    return [label for label in labels if label in shown]


def relation_matrix(table: pd.DataFrame, labels: list[str], heads: int, column: str) -> NDArray[np.float64]:
    """[label h] of one column, NaN where the pair was not observed."""
    values = np.full((len(labels), heads), np.nan)
    rows = {label: row for row, label in enumerate(labels)}
    for label, head, value in zip(table["label"], table["head"], table[column], strict=True):
        if label in rows:
            values[rows[label], int(head)] = value
    return values


def _supported(run: Study, site: str, layer: int) -> set[tuple[int, str]]:
    """Heads of a layer with the relations that they are labelled by."""
    heads = run.heads_of(site, layer)
    return {
        (int(head), label.removeprefix("syntactic:"))
        for head, functions in zip(heads["head"], heads["functions"], strict=True)
        for label in functions.split(";")
    }


def _draw(
    axes: Axes,
    table: pd.DataFrame,
    labels: list[str],
    size: tuple[int, float],
    norm: Normalize,
    supported: set[tuple[int, str]],
) -> None:
    heads, pitch = size
    accuracy = relation_matrix(table, labels, heads, "accuracy")
    base = table.drop_duplicates("label").set_index("label")["baseline"].reindex(labels)
    draw_cells(axes, np.asarray(base, dtype=np.float64)[:, None], cmap="Blues", norm=norm, edge=0.4)
    shades = draw_cells(axes, accuracy, cmap="Blues", norm=norm, edge=0.4, left=1 + GAP)
    margin = relation_matrix(table, labels, heads, "margin")
    for row, head in zip(*np.nonzero(margin >= CLEAR - 1e-12), strict=True):
        ink = contrast(shades.to_rgba(accuracy[row, head]))
        fill = ink if (int(head), labels[row]) in supported else "none"
        place = (1 + GAP + head + 0.5, row + 0.5)
        axes.plot(*place, marker="o", markersize=2.6, color=ink, markerfacecolor=fill, markeredgewidth=0.5)
    axes.set_xlim(0, 1 + GAP + heads)
    shown = list(range(0, heads, tick_step(heads, pitch)))
    axes.set_xticks([0.5, *(1 + GAP + head + 0.5 for head in shown)], ["b", *map(str, shown)])
    axes.set_yticks(np.arange(len(labels)) + 0.5, labels, parse_math=False)
    axes.set_xlabel("head", size=LABEL, labelpad=1.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
