"""How far apart the heads of each layer are, as a change against a first run (Azov & Landau, figures 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from headscope.errors import ConfigError
from headscope.report.charts import Array, frame_chart, share_limits
from headscope.report.figures.similarity import layer_matrices
from headscope.report.marks import color_of
from headscope.report.registry import PlotFigure
from headscope.report.sheet import INK, Sheet
from headscope.results.study import Study

MEASURES: Mapping[str, tuple[str, Callable[[Array], Array]]] = {
    "cosine": ("Σ (1 − cosine)", lambda matrix: 1 - matrix),
    "l2": ("Σ L2 distance", lambda matrix: matrix),
}
"""Title, and what of two heads is summed: 0 for heads that do the same."""
Changes = Mapping[str, Mapping[str, Array]]
"""By measure and site: per cent, [run layer]."""


def discrepancy_changes(runs: Sequence[Study]) -> Changes:
    """By how many per cent the summed differences of a layer's heads are more than in the first run.

    The sum is over all pairs of heads. The published figures are of this sum and do not say which text and which
    statistics they are of. ConfigError for one run only, and for runs of other layers.
    """
    base, *others = runs
    if not others or any(run.layout != base.layout for run in others):
        raise ConfigError("the figure needs a baseline and other runs of models with the same layers and heads")
    changes: dict[str, dict[str, Array]] = {}
    for measure, (_, difference) in MEASURES.items():
        sums = [
            {layer: float(difference(matrix).sum()) for layer, matrix in layer_matrices(run, measure).items()}
            for run in runs
        ]
        for site, counts in base.layout.items():
            table = np.array([[its[site, layer] for layer, _ in enumerate(counts)] for its in sums])
            with np.errstate(invalid="ignore", divide="ignore"):
                changes.setdefault(measure, {})[site] = 100 * (table[1:] / table[0] - 1)
    return changes


def draw_discrepancy(runs: Sequence[Study], sheet: Sheet, _: object) -> None:
    """A line a measure, a panel a site, a group of bars a layer: a bar a run, against the first."""
    changes = discrepancy_changes(runs)
    sites = list(runs[0].layout)
    titles = sites * len(MEASURES)
    panels = sheet.panels(titles, [(24.0, 14.0)] * len(titles), starts={len(sites)}, share="")
    for row, (measure, (title, _)) in enumerate(MEASURES.items()):
        line = panels[row * len(sites) : (row + 1) * len(sites)]
        for axes, site in zip(line, sites, strict=True):
            frame_chart(axes, "layer", f"{title}, change (%)" if axes is line[0] else "", whole=(True, False))
            width = 0.8 / (len(runs) - 1)
            for number, its in enumerate(changes[measure][site]):
                places = np.arange(its.size) + (number - (len(runs) - 2) / 2) * width
                axes.bar(places, its, width=width, color=color_of(number), linewidth=0, label=runs[number + 1].name)
            axes.axhline(0, color=INK, linewidth=0.6)
        share_limits(line)
    first = runs[0]
    sheet.headline(f"How far apart heads are, against {first.name}", f"{first.name}: {first.model} · {first.data}")


DISCREPANCY = PlotFigure(
    "discrepancy",
    "How far apart the heads of each layer are, against a first run: cosine and L2 of their contexts.",
    draw_discrepancy,
    runs="together",
    order=430,
)
