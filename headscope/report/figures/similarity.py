"""How alike the heads of a layer are: one [h h] matrix a layer, on one scale for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.config.declarations import Measure, pair_measures
from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report.layout.grid import draw_cells, measure_limits, parse_range, square_ticks
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import BAR, LABEL, Page
from headscope.report.layout.panels import Panels
from headscope.results.study import Study

LEFT, ABOVE, BELOW = 0.36, 0.2, 0.3


def similarity_matrices(run: Study, measure: str | None = None, *, range: Sequence[float] = ()) -> Figure:
    """Heads × heads of every layer; cosine diverges around 0, CKA and divergence have ends, distances start at 0.

    Without a `measure` cosine, or the first one of a run that has no cosine. `range` is another scale.
    """
    if measure is None:
        measure = min(similarity_measures(run), key=lambda name: name != "cosine", default="cosine")
    # what a head is to itself says nothing and would set the scale
    matrices = {
        layer: np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        for layer, matrix in layer_matrices(run, measure).items()
    }
    heads = max((len(matrix) for matrix in matrices.values()), default=1)
    usual = max(0.085, min(0.22, (1.7 if len(matrices) <= 8 else 1.4) / heads))
    pitch = cell_pitch(usual, heads, besides=LEFT + BAR)
    side = heads * pitch
    most = widest(12.6, besides=BAR)
    valued = {layer for layer, matrix in matrices.items() if np.isfinite(matrix).any()}
    panels = Panels.plan(run, (LEFT + side, ABOVE + side + BELOW), widest=most, only=valued or set(matrices))
    shown = replace(pair_measures().get(measure) or Measure(measure), range=(None, None))
    page = Page(
        panels.flow.width + BAR,
        panels.flow.height,
        title=f"Similarity of heads within a layer: {shown.words}",
        subtitle=f"{run.model} · {run.data} · without what a head is to itself",
        footer=run.signature,
    )
    norm = parse_range(range) or measure_limits(shown, list(matrices.values()))
    for panel, (left, top) in panels:
        site, layer, count = panel
        extent = side * count / heads
        axes = panels.axes(page, panel, left + LEFT, top + ABOVE, extent, extent)
        draw_cells(axes, matrices[site, layer], cmap=shown.cmap, norm=norm, edge=0.3 if heads <= 12 else 0)
        square_ticks(axes, count, pitch)
        axes.set_xlabel("head", size=LABEL, labelpad=1.5)
        if left == 0:
            axes.set_ylabel("head", size=LABEL, labelpad=2)
    bar = ScalarMappable(norm, shown.cmap)
    at = panels.flow.width + 0.1
    page.color_bar(at, ABOVE, side, bar, label=shown.label, unit=shown.unit, values=list(matrices.values()))
    return page.finished()


def similarity_measures(run: Study) -> list[str]:
    """The measures that `similarity.npz` holds."""
    names = {key.rpartition("/")[2] for key in run.similarity}
    return sorted(name for name in names if not name.endswith(("_low", "_high")))


def layer_matrices(run: Study, measure: str) -> dict[tuple[str, int], NDArray[np.float64]]:
    """Matrix of every layer that has heads; a layer that the file lacks is empty (all NaN)."""
    if measure not in similarity_measures(run):
        raise ConfigError(f"run {run.name}: {unknown('similarity', measure, similarity_measures(run))}")
    matrices = {}
    for site, counts in run.layout.items():
        for layer, count in enumerate(counts):
            key = f"{site}/{layer}/{measure}"
            matrices[site, layer] = run.similarity.get(key, np.full((count, count), np.nan))
    return matrices
