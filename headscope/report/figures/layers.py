"""A panel a layer: how alike heads are, matrices that mix them, where they look, and what explains that."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from headscope.config.declarations import Measure, declarations, head_functions
from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report import charts
from headscope.report.charts import Array, draw_bars, draw_cells, layer_panels, number_cells
from headscope.report.marks import color_of, contrast, functions_of, signed_offset
from headscope.report.registry import PlotFigure
from headscope.report.sheet import INK, PALE, Sheet, em, text_width
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

Matrices = Mapping[tuple[str, int], Array]
MAX_EDGED_HEADS = 12  # larger matrices have no white lines between cells
SIGMA = 7.0  # ems of the singular values beside a matrix
MAX_OFFSET = 10  # larger offsets are summed into a tail on either side
MIN_OFFSET_SHARE = 0.01  # share of a head's queries for which an offset gets a column of its own
MIN_MARGIN = 0.10  # a head is syntactic if it beats the baseline by this much
MAX_RELATIONS = 24  # rows of a panel; of more relations the clearest are shown
GAP = 1.5  # columns of the baseline and of the gap beside it
MEAN_GAP = 0.6  # columns between the heads and the layer's mean
DIFFERENCES: Mapping[str, tuple[str, Callable[[Array], Array]]] = {
    "cosine": ("Σ (1 − cosine)", lambda matrix: 1 - matrix),
    "l2": ("Σ L2 distance", lambda matrix: matrix),
}
"""Axis label, and the function of a similarity matrix that is summed: 0 for two equal heads."""
PARTS = {
    "position": ("position", "#0072b2"),
    "token": ("the key token", "#56b4e9"),
    "classes": ("classes", "#009e73"),
    "lexical": ("pairs of words", "#e69f00"),
    "syntax": ("syntax", "#cc79a7"),
}
"""The groups of a description in words, and their colours (Okabe and Ito)."""


def draw_similarity(run: Study, sheet: Sheet, options: Any) -> None:
    """A matrix of heads × heads for every layer, with one colour scale for all."""
    name = options.measure or min(similarity_measures(run), key=lambda kind: kind != "cosine", default="cosine")
    # without the diagonal, which is the same for all heads and would set the scale
    matrices = {
        layer: np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        for layer, matrix in layer_matrices(run, name).items()
    }
    heads = max((len(matrix) for matrix in matrices.values()), default=1)
    with_values = {layer for layer, matrix in matrices.items() if np.isfinite(matrix).any()} or set(matrices)
    pairs = {measure.name: measure for analysis in declarations("pairs") for measure in analysis.pairs}
    measure = replace(pairs.get(name) or Measure(name), range=(None, None))
    norm = charts.measure_limits(measure, list(matrices.values()), options.range)
    side = max(10.0, min(2.3 * heads, 17.0))
    panels = layer_panels(sheet, run, (side, side), with_values, bar=True)
    for key, axes in panels.items():
        shades = draw_cells(axes, matrices[key], cmap=measure.cmap, norm=norm, edge=heads <= MAX_EDGED_HEADS)
        axes.set(xlim=(0, heads), ylim=(heads, 0), xlabel="head", ylabel="head")
        number_cells(axes, x=heads, y=heads)
    sheet.scale(shades, list(panels.values()), measure.label, list(matrices.values()))
    subtitle = f"{run.model} · {run.data} · without what a head is to itself"
    sheet.headline(f"Similarity of heads within a layer: {measure.words}", subtitle)


def similarity_measures(run: Study) -> list[str]:
    """The measures that `similarity.npz` holds."""
    names = {key.rpartition("/")[2] for key in run.similarity}
    return sorted(name for name in names if not name.endswith(("_low", "_high")))


def layer_matrices(run: Study, measure: str) -> dict[tuple[str, int], Array]:
    """Matrix of every layer that has heads; a layer that the file lacks is empty (all NaN)."""
    if measure not in similarity_measures(run):
        raise ConfigError(f"run {run.name}: {unknown('similarity', measure, similarity_measures(run))}")
    return {
        (site, layer): run.similarity.get(f"{site}/{layer}/{measure}", np.full((count, count), np.nan))
        for site, counts in run.layout.items()
        for layer, count in enumerate(counts)
    }


def discrepancy_changes(runs: Sequence[Study]) -> dict[str, dict[str, Array]]:
    """By measure and site [run layer]: by how many per cent the heads of a layer differ more than in the first run."""
    base, *later_runs = runs
    if not later_runs or any(run.layout != base.layout for run in later_runs):
        raise ConfigError("the figure needs a baseline and other runs of models with the same layers and heads")
    changes: dict[str, dict[str, Array]] = {}
    for measure, (_, difference) in DIFFERENCES.items():
        sums = [
            {layer: float(difference(matrix).sum()) for layer, matrix in layer_matrices(run, measure).items()}
            for run in runs
        ]
        for site, counts in base.layout.items():
            table = np.array([[by_layer[site, layer] for layer, _ in enumerate(counts)] for by_layer in sums])
            with np.errstate(invalid="ignore", divide="ignore"):
                changes.setdefault(measure, {})[site] = 100 * (table[1:] / table[0] - 1)
    return changes


def draw_discrepancy(runs: Sequence[Study], sheet: Sheet, _: object) -> None:
    """A line of panels for each measure, a panel for each site, in each layer a bar for each run (Azov & Landau,
    figures 6 and 7).
    """
    first, *later_runs = runs
    sites, width = list(first.layout), 0.8 / max(len(later_runs), 1)
    titles = sites * len(DIFFERENCES)
    panels = iter(sheet.panels(titles, [(24.0, 14.0)] * len(titles), starts={len(sites)}, share=""))
    for measure, changes in discrepancy_changes(runs).items():
        line = [next(panels) for _ in sites]
        for axes, by_run in zip(line, changes.values(), strict=True):
            ylabel = f"{DIFFERENCES[measure][0]}, change (%)" if axes is line[0] else ""
            charts.frame_chart(axes, "layer", ylabel, integers=(True, False))
            for number, (run, values) in enumerate(zip(later_runs, by_run, strict=True)):
                positions = np.arange(values.size) + (number - (len(later_runs) - 1) / 2) * width
                axes.bar(positions, values, width=width, color=color_of(number), linewidth=0, label=run.name)
            axes.axhline(0, color=INK, linewidth=0.6)
        charts.share_limits(line)
    sheet.headline(f"How far apart heads are, against {first.name}", f"{first.name}: {first.model} · {first.data}")


DISCREPANCY = PlotFigure(
    "discrepancy",
    "How far apart the heads of each layer are, against a first run: cosine and L2 of their contexts.",
    draw_discrepancy,
    runs="together",
    order=430,
)


def draw_alphas(run: Study, sheet: Sheet, _: object) -> None:
    """The matrix of every module, on one colour scale centred at zero, and its singular values on one axis."""
    matrices = alpha_matrices(run)
    heads = max(len(matrix) for matrix in matrices.values())
    side = max(12.0, min(2.2 * heads, 18.0))
    norm = charts.value_limits(list(matrices.values()), symmetric=True)
    spectra = [np.linalg.svd(matrix, compute_uv=False) for matrix in matrices.values()]
    largest = max(float(values.max(initial=0)) for values in spectra) or 1.0
    pairs = zip(matrices, spectra, strict=True)
    titles = [text for (site, layer), sigma in pairs for text in (f"{site} · layer {layer}", f"Σσ {sigma.sum():.1f}")]
    sites = [site for site, _ in matrices]
    starts = {2 * number for number in range(1, len(sites)) if sites[number] != sites[number - 1]}
    sizes = [(side, side), (SIGMA, side)] * len(matrices)
    panels = sheet.panels(titles, sizes, starts=starts, bar=True, beside=3.5, share="", group=2)
    for matrix, values, axes, right_axes in zip(matrices.values(), spectra, panels[::2], panels[1::2], strict=True):
        count = len(matrix)
        shades = draw_cells(axes, matrix, cmap="RdBu_r", norm=norm, edge=heads <= MAX_EDGED_HEADS)
        number_cells(axes, x=count, y=count)
        draw_bars(right_axes, np.arange(count), {"_": ("#0072b2", values)}, horizontal=True)
        right_axes.set(xlim=(0, largest * 1.05), ylim=(count - 0.5, -0.5), yticks=[], xlabel="σ")
        right_axes.xaxis.set_major_locator(MaxNLocator(2))
    sheet.scale(shades, panels, "weight")
    subtitle = f"{run.model} · row: new head, column: head it is made of"
    sheet.headline("Matrices that mix heads, and their singular values", subtitle)


def alpha_matrices(run: Study) -> Matrices:
    """The matrix of every (site, layer) that has one, from a pickle of the fork or from `alphas.csv`."""
    if not run.has_table("alphas"):
        keys = {key: key.split("/") for key in run.arrays if key.endswith("/alpha")}
        if keys:
            return {(site, int(layer)): run.arrays[key] for key, (site, layer, _) in keys.items()}
    matrices = {}
    layer: Any
    for (site, layer), table in run.table("alphas", "source", "alpha").groupby(["site", "layer"], sort=False):
        count = run.layout[str(site)][int(layer)]
        matrix = np.full((count, count), np.nan)
        matrix[table["head"].to_numpy(int), table["source"].to_numpy(int)] = table["alpha"]
        matrices[str(site), int(layer)] = matrix
    if not matrices or not all(np.isfinite(matrix).all() for matrix in matrices.values()):
        raise MissingTable(f"run {run.name}: alphas.csv has no complete matrix; analyse again")
    return matrices


def draw_offsets(run: Study, sheet: Sheet, _: object) -> None:
    """The share of queries whose most attended key is at each offset; the offset of a positional head has a frame."""
    shares = offset_shares(run)
    heads, columns = run.most_heads, next(iter(shares.values())).shape[1]
    reach = (columns - 3) // 2
    layers = {layer for layer, histogram in shares.items() if histogram.any()} or set(shares)
    size = (max(1.1 * columns, 12.0), heads * (1.25 if heads > 8 else 1.5))
    panels = layer_panels(sheet, run, size, layers, bar=True, beside=7.5)
    step = 4 if reach >= 8 else 2 if reach >= 2 else 1
    ticks = range(-(reach // step) * step, reach + 1, step)
    looks = {"size": rcParams["ytick.labelsize"], "ha": "left", "va": "center_baseline"}
    for (site, layer), axes in panels.items():
        shades = draw_cells(axes, shares[site, layer])
        axes.vlines((1, columns - 1), 0, len(shares[site, layer]), color="#888888", linewidth=0.5)
        axes.set(ylim=(heads, 0), xlabel="offset: key − query", ylabel="head")
        number_cells(axes, y=heads)
        positions = [0.5, *(tick + reach + 1.5 for tick in ticks), columns - 0.5]
        axes.set_xticks(positions, ["<", *map(signed_offset, ticks), ">"])
        for row in run.heads_of(site, layer).to_dict("records"):
            for function in functions_of(row["functions"]):
                if function.family.name == "positional" and function.detail.lstrip("+-").isdigit():
                    column = int(np.clip(int(function.detail), -reach - 1, reach + 1)) + reach + 1
                    axes.add_patch(Rectangle((column, row["head"]), 1, 1, fill=False, edgecolor="#d55e00", zorder=3))
                    axes.text(2 * reach + 3.4, row["head"] + 0.5, function.texts[0], **looks)
    sheet.scale(shades, list(panels.values()), "share of queries")
    family = head_functions()["positional"]
    meaning = "positional head, with the offset that holds at least 90 %"
    beyond = f"<  >  offsets beyond −{reach} and +{reach}"
    sheet.key(f"{family.glyph}{family.letter}  {meaning}", beyond)
    sheet.headline("Offset of the most attended token", f"{run.model} · {run.data}")


def offset_shares(run: Study) -> dict[tuple[str, int], Array]:
    """By site and layer [h offset]: the lower tail, offsets as far as heads use them (at most ±10), the upper tail."""
    table = run.table("positional", "offset", "count", "share")
    of_all = table["count"] / table.groupby(["site", "layer", "head"])["count"].transform("sum")
    offsets = table["offset"][of_all >= MIN_OFFSET_SHARE].abs()
    reach = int(min(max(offsets.max() if len(offsets) else 1, 1), MAX_OFFSET))
    shares = {
        (site, layer): np.zeros((count, 2 * reach + 3))
        for site, counts in run.layout.items()
        for layer, count in enumerate(counts)
    }
    columns = table["offset"].clip(-reach - 1, reach + 1) + reach + 1
    parts = table["share"].where(table["offset"].abs() <= reach, of_all)
    rows = zip(table["site"], table["layer"], table["head"], columns, parts, strict=True)
    for site, layer, head, column, share in rows:
        shares[site, layer][head, int(column)] += share
    return shares


def draw_relations(run: Study, sheet: Sheet, _: object) -> None:
    """The accuracy of every head on every relation and direction, beside that of the best fixed offset."""
    table = run.table("syntactic", "relation", "label", "count", "accuracy", "baseline", "margin")
    if not len(table):
        raise MissingTable(f"run {run.name}: syntactic.csv holds no relation; analyse more sentences")
    best = table.groupby("label")["margin"].max().sort_values(ascending=False, kind="stable")
    clearest = {*best.index[:MAX_RELATIONS]}
    labels = [str(label) for label in table["label"].unique() if label in clearest]
    note = f" · {len(best) - len(labels)} rows not shown" if len(best) > len(labels) else ""
    sheet.headline("Accuracy of heads on syntactic relations", f"{run.model} · {run.data}{note}")
    sheet.key(
        "b  baseline: the best fixed offset for the relation",
        "●  head at least 10 points above the baseline, and labelled so",
        "○  the same, but the label was withheld for lack of evidence (labels.csv)",
        ">  from head word to dependent (verb to subject)",
        "<  from dependent to head word",
    )
    _draw_rates(run, sheet, table, labels, "accuracy")


def draw_alignment(run: Study, sheet: Sheet, _: object) -> None:
    """The share of target words whose source word each head looks at, by relation."""
    table = run.table("alignment", "relation", "share", "baseline_diagonal").assign(margin=np.nan)
    table = table.rename(columns={"relation": "label", "share": "accuracy", "baseline_diagonal": "baseline"})
    sheet.headline("Share of positions at which heads look at the aligned word", f"{run.model} · {run.data}")
    sheet.key(
        "b  baseline: the key on the diagonal",
        "fed  the word that the position reads; predicted and next: the one and the two after",
    )
    relations = [name for name in ("predicted", "fed", "next", "successor") if name in set(table["label"])]
    _draw_rates(run, sheet, table, relations, "share")


def _draw_rates(run: Study, sheet: Sheet, table: pd.DataFrame, labels: list[str], unit: str) -> None:
    """Draw a matrix of labels × heads for every layer, with the baseline at its left."""
    heads = run.most_heads
    gutter = max(text_width(label, rcParams["ytick.labelsize"]) for label in labels) / em() + 2
    size = ((heads + GAP) * 1.5, len(labels) * 1.45)
    layers = set(zip(table["site"], table["layer"], strict=True))
    panels = layer_panels(sheet, run, size, layers, bar=True, beside=max(gutter if len(layers) < 3 else 3.0, 2.0))
    for (site, layer), axes in panels.items():
        rows = table[(table["site"] == site) & (table["layer"] == layer)]
        base = rows.drop_duplicates("label").set_index("label")["baseline"].reindex(labels).to_numpy(float)
        draw_cells(axes, base[:, None])
        shades = draw_cells(axes, _rates(rows, labels, heads, "accuracy"), left=GAP)
        number_cells(axes, x=heads, left=GAP)
        axes.text(0.5, len(labels) + 0.3, "b", size=rcParams["xtick.labelsize"], ha="center", va="top")
        axes.set(xlim=(0, GAP + heads), xlabel="head")
        axes.set_yticks(np.arange(len(labels)) + 0.5, labels, parse_math=False)
        functions = run.heads_of(site, layer).set_index("head")["functions"].str.split(";")
        for row, head in np.argwhere(_rates(rows, labels, heads, "margin") >= MIN_MARGIN - 1e-12):
            ink = contrast(shades.to_rgba(np.ma.filled(shades.get_array(), np.nan)[row, head]))  # type: ignore[arg-type]
            fill = ink if f"syntactic:{labels[row]}" in functions[head] else "none"
            looks: dict[str, Any] = {"markersize": 2.6, "color": ink, "markerfacecolor": fill, "markeredgewidth": 0.5}
            axes.plot(GAP + head + 0.5, row + 0.5, "o", **looks)
    sheet.scale(shades, list(panels.values()), unit)


def _rates(table: pd.DataFrame, labels: list[str], heads: int, column: str) -> Array:
    """A column as a matrix [label h], NaN for pairs that the table lacks."""
    wide = table.pivot_table(index="label", columns="head", values=column, aggfunc="last", dropna=False)
    return wide.reindex(index=labels, columns=range(heads)).to_numpy(float)


def draw_explained(run: Study, sheet: Sheet, _: object) -> None:
    """A bar for every head and one for the mean of its layer; the line at the end of a bar is the 95 % interval."""
    if "explained" not in run.heads:
        raise MissingTable(f"run {run.name} has no explained shares; run `headscope analyze … --also explained` first")
    heads = run.heads.dropna(subset=["explained"])
    if heads.empty:
        raise MissingTable(f"run {run.name}: no head has an explained share; analyse more sentences")
    layers = set(zip(heads["site"], heads["layer"], strict=True))
    size = ((run.most_heads + MEAN_GAP + 1) * 1.7, 11.0)
    for (site, layer), axes in layer_panels(sheet, run, size, layers).items():
        _draw_parts(axes, run.heads_of(site, layer).sort_values("head"), run.most_heads)
    sheet.key("μ  mean of the layer")
    note = "share on sentences that the description was not fitted to"
    sheet.headline("What explains each head", f"{run.model} · {run.data} · {note}")


def _draw_parts(axes: Axes, rows: pd.DataFrame, heads: int) -> None:
    positions = np.array([*rows["head"], heads + MEAN_GAP], dtype=float)
    has_share = np.isfinite(rows["explained"].to_numpy(float))  # other heads have no parts either
    has_bar = np.append(has_share, has_share.any())
    axes.bar(positions[has_bar], 1.0, width=0.86, color=PALE, linewidth=0, label="only the sentence says it")
    height, parts = np.zeros(len(positions)), {}
    for group, (words, color) in PARTS.items():
        values = rows.get(f"explained_{group}", pd.Series(0.0, index=rows.index)).astype(float).where(has_share)
        part = np.minimum(np.nan_to_num([*values, values.mean()]).clip(min=0), 1 - height)
        parts[words] = color, part
        height = height + part
    draw_bars(axes, positions, parts)
    low, high = (rows[f"explained_{end}"].to_numpy(float).clip(0, 1) for end in ("low", "high"))
    axes.vlines(positions[:-1][has_share], low[has_share], high[has_share], color="black", linewidth=0.7)
    step = next(step for step in (1, 2, 5, 10, 20, 50) if heads / step <= 12 or step == 50)
    ticks = range(0, heads, step)
    axes.set_xticks([*ticks, positions[-1]], [*map(str, ticks), "μ"])
    axes.set(xlim=(-0.5, heads + MEAN_GAP + 0.5), ylim=(0, 1), yticks=[0, 0.5, 1], xlabel="head", ylabel="share")
