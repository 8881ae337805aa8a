"""How far apart the heads of each layer are, as a change against a first run (Azov & Landau, figures 6 and 7)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.report.figures.similarity import layer_matrices
from headscope.report.layout.legend import COLORS, Entry, Legend
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import INK, Page, Swatch
from headscope.report.layout.panels import chart
from headscope.report.registry import PlotFigure
from headscope.results.study import Study

WIDTH, HEIGHT = 2.3, 1.4  # inches of the axes of one panel
LEFT, ABOVE, BELOW = 0.6, 0.26, 0.36
MEASURES: Mapping[str, tuple[str, Callable[[NDArray[np.float64]], NDArray[np.float64]]]] = {
    "cosine": ("Σ (1 − cosine)", lambda matrix: 1 - matrix),
    "l2": ("Σ L2 distance", lambda matrix: matrix),
}
"""Title, and what of two heads is summed: 0 for heads that do the same."""
Changes = Mapping[str, Mapping[str, NDArray[np.float64]]]
"""By measure and site: per cent, [run layer]."""


def discrepancy_changes(runs: Sequence[Study]) -> Changes:
    """By how many per cent the summed differences of a layer's heads are more than in the first run.

    The sum is over all pairs of heads. The published figures are of this sum and do not say which text and which
    statistics they are of. ConfigError for one run only, and for runs of other layers.
    """
    base, *others = runs
    if not others or any(run.layout != base.layout for run in others):
        raise ConfigError("the figure needs a baseline and other runs of models with the same layers and heads")
    changes: dict[str, dict[str, NDArray[np.float64]]] = {}
    for measure, (_, difference) in MEASURES.items():
        sums = [
            {layer: float(difference(matrix).sum()) for layer, matrix in layer_matrices(run, measure).items()}
            for run in runs
        ]
        for site, counts in base.layout.items():
            layers = [(site, layer) for layer, _ in enumerate(counts)]
            first = np.array([sums[0][layer] for layer in layers])
            table = np.array([[its[layer] for layer in layers] for its in sums[1:]])
            with np.errstate(invalid="ignore", divide="ignore"):
                changes.setdefault(measure, {})[site] = 100 * (table / first - 1)
    return changes


def discrepancy_figure(runs: Sequence[Study]) -> Figure:
    """A row a measure, a column a site, a group of bars a layer: a bar a run, against the first."""
    changes = discrepancy_changes(runs)
    sites = list(runs[0].layout)
    wide = cell_pitch(WIDTH, len(sites), besides=len(sites) * LEFT, least=0.35)
    width, height = len(sites) * (LEFT + wide), len(MEASURES) * (ABOVE + HEIGHT + BELOW)
    entries: list[Entry] = [(Swatch(width=3.0), COLORS[n % len(COLORS)], run.name) for n, run in enumerate(runs[1:])]
    legend = Legend.plan(entries, widest(max(width, 4.6)))
    page = Page(
        width,
        height + legend.height,
        title=f"How far apart heads are, against {runs[0].name}",
        subtitle=f"{runs[0].name}: {runs[0].model} · {runs[0].data}",
        footer="\n".join(run.signature for run in runs),
    )
    for row, (measure, (title, _)) in enumerate(MEASURES.items()):
        panels = []
        for column, site in enumerate(sites):
            axes = page.axes(column * (LEFT + wide) + LEFT, row * (ABOVE + HEIGHT + BELOW) + ABOVE, wide, HEIGHT)
            label = f"{title}, change (%)" if column == 0 else ""
            chart(axes, title=site, xlabel="layer", ylabel=label, width=wide, whole=(True, False))
            _bars(axes, changes[measure][site])
            panels.append(axes)
        ends = np.array([[0.0, 0.0], *(panel.dataLim.intervaly for panel in panels)])
        low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
        room = 0.08 * (high - low) or 1.0
        for panel in panels:
            panel.set_ylim(low - room, high + room)
    legend.draw(page, height)
    return page.finished()


def _bars(axes: Axes, changes: NDArray[np.float64]) -> None:
    runs, layers = changes.shape
    for number, its in enumerate(changes):
        at = np.arange(layers) + (number - (runs - 1) / 2) * 0.8 / runs
        axes.bar(at, its, width=0.8 / runs, color=COLORS[number % len(COLORS)], linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.6)


DISCREPANCY = PlotFigure(
    "discrepancy",
    "How far apart the heads of each layer are, against a first run: cosine and L2 of their contexts.",
    discrepancy_figure,
    runs="together",
    order=430,
)
