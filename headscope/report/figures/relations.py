"""How often a head's argmax is the syntactic partner: relations × heads, one panel a layer."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.colors import Normalize

from headscope.report.charts import Array, draw_cells, number_cells
from headscope.report.grid import layer_panels
from headscope.report.marks import contrast
from headscope.report.sheet import Sheet, em, letters, text_width
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

CLEAR = 0.10  # a head is syntactic where it beats the baseline by this much
MOST = 24  # rows of one panel; with more relations the clearest are shown
GAP = 1.5  # columns of the baseline and of the gap beside it


def draw_relations(run: Study, sheet: Sheet, _: object) -> None:
    """Accuracy of every head on every relation and direction, beside the best fixed offset's."""
    table = run.table("syntactic", "relation", "label", "count", "accuracy", "baseline", "margin")
    labels = clearest_labels(table, MOST)
    if not labels:
        raise MissingTable(f"run {run.name}: syntactic.csv holds no relation; analyse more sentences")
    hidden = table["label"].nunique() - len(labels)
    note = f" · {hidden} rows not shown" if hidden else ""
    sheet.headline("Accuracy of heads on syntactic relations", f"{run.model} · {run.data}{note}")
    sheet.key(
        letters("b", "baseline: the best fixed offset for the relation"),
        letters("●", "head at least 10 points above the baseline, and labelled so"),
        letters("○", "the same, but the label was withheld for lack of evidence (labels.csv)"),
        letters(">", "from head word to dependent (verb to subject)"),
        letters("<", "from dependent to head word"),
    )
    _draw_rates(run, sheet, table, labels, "accuracy")


def draw_alignment(run: Study, sheet: Sheet, _: object) -> None:
    """How often every head looks at the source word that belongs to a target word, by relation."""
    table = run.table("alignment", "relation", "share", "baseline_diagonal").assign(margin=np.nan)
    table = table.rename(columns={"relation": "label", "share": "accuracy", "baseline_diagonal": "baseline"})
    title = "Share of positions at which heads look at the aligned word"
    sheet.headline(title, f"{run.model} · {run.data}")
    sheet.key(
        letters("b", "baseline: the key on the diagonal"),
        letters("fed", "the word that the position reads; predicted and next: the one and the two after"),
    )
    relations = [name for name in ("predicted", "fed", "next", "successor") if name in set(table["label"])]
    _draw_rates(run, sheet, table, relations, "share")


def clearest_labels(table: pd.DataFrame, most: int) -> list[str]:
    """All labels as the table orders them; more than `most`: those with the largest margin of any head."""
    best = table.groupby("label")["margin"].max().sort_values(ascending=False, kind="stable")
    shown = set(best.index[:most])
    return [str(label) for label in table["label"].unique() if label in shown]


def _draw_rates(run: Study, sheet: Sheet, table: pd.DataFrame, labels: list[str], unit: str) -> None:
    """Labels × heads of every layer."""
    heads = run.most_heads
    gutter = max(text_width(label, rcParams["ytick.labelsize"]) for label in labels) / em() + 2
    size = ((heads + GAP) * 1.5, len(labels) * 1.45)
    layers = set(zip(table["site"], table["layer"], strict=True))
    panels = layer_panels(sheet, run, size, layers, bar=True, beside=max(gutter if len(layers) < 3 else 3.0, 2.0))
    for (site, layer), axes in panels.items():
        rows = table[(table["site"] == site) & (table["layer"] == layer)]
        base = rows.drop_duplicates("label").set_index("label")["baseline"].reindex(labels).to_numpy(float)
        draw_cells(axes, base[:, None], cmap="Blues", norm=Normalize(0, 1))
        shades = draw_cells(
            axes, rate_matrix(rows, labels, heads, "accuracy"), cmap="Blues", norm=Normalize(0, 1), left=GAP
        )
        number_cells(axes, x=heads, left=GAP)
        axes.text(0.5, len(labels) + 0.3, "b", size=rcParams["xtick.labelsize"], ha="center", va="top")
        axes.set(xlim=(0, GAP + heads), xlabel="head")
        axes.set_yticks(np.arange(len(labels)) + 0.5, labels, parse_math=False)
        clear = np.argwhere(rate_matrix(rows, labels, heads, "margin") >= CLEAR - 1e-12)
        supported = _supported(run, site, layer)
        for row, head in clear:
            ink = contrast(shades.to_rgba(np.ma.filled(shades.get_array(), np.nan)[row, head]))  # type: ignore[arg-type]
            fill = ink if (int(head), labels[row]) in supported else "none"
            place = GAP + head + 0.5, row + 0.5
            axes.plot(*place, "o", markersize=2.6, color=ink, markerfacecolor=fill, markeredgewidth=0.5)
    sheet.scale(shades, list(panels.values()), unit)


def rate_matrix(table: pd.DataFrame, labels: list[str], heads: int, column: str) -> Array:
    """[label h] of one column, NaN where the pair was not observed."""
    wide = table.pivot_table(index="label", columns="head", values=column, aggfunc="last", dropna=False)
    return wide.reindex(index=labels, columns=range(heads)).to_numpy(float)


def _supported(run: Study, site: str, layer: int) -> set[tuple[int, str]]:
    """Heads of a layer with the relations that they are labelled by."""
    heads = run.heads_of(site, layer)
    return {
        (int(head), label.removeprefix("syntactic:"))
        for head, functions in zip(heads["head"], heads["functions"], strict=True)
        for label in functions.split(";")
    }
