"""How alike the heads of a layer are: one [h h] matrix a layer, on one scale for all."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report.layout.grid import draw_cells
from headscope.report.layout.page import BAR, LABEL, Page
from headscope.report.layout.panels import Panels
from headscope.report.readers.run import AnalysisRun, RunError

LEFT, ABOVE, BELOW = 0.36, 0.2, 0.3
NAMES = {
    "cosine": "cosine of contexts",
    "l2": "L2 distance of contexts",
    "cka": "linear CKA of contexts",
    "js": "Jensen–Shannon divergence of weights",
}


def similarity_matrices(run: AnalysisRun, measure: str | None = None) -> Figure:
    """Heads × heads of every layer; cosine diverges around 0, CKA fills 0 to 1, distances start at 0.

    Without a `measure` cosine, or the first one of a run that has no cosine.
    """
    if measure is None:
        measure = min(similarity_measures(run), key=lambda name: name != "cosine", default="cosine")
    matrices = layer_matrices(run, measure)
    heads = max((len(matrix) for matrix in matrices.values()), default=1)
    side = heads * max(0.085, min(0.22, (1.7 if len(matrices) <= 8 else 1.4) / heads))
    panels = Panels.plan(run, (LEFT + side, ABOVE + side + BELOW), widest=12.6)
    name = NAMES.get(measure, measure)
    page = Page(
        panels.flow.width + BAR,
        panels.flow.height,
        title=f"Similarity of heads within a layer: {name}",
        subtitle=f"{run.model} · {run.data}",
        footer=run.signature,
    )
    cmap, norm = _scale(measure, matrices)
    for (site, layer, count), (left, top) in zip(panels.layers, panels.flow.corners, strict=True):
        extent = side * count / heads
        axes = page.axes(left + LEFT, top + ABOVE, extent, extent)
        draw_cells(axes, matrices[site, layer], cmap=cmap, norm=norm, edge=0.3 if heads <= 12 else 0)
        _label(axes, count, first=left == 0)
        title = panels.title((site, layer, count))
        axes.set_title(title, size=LABEL, loc="left", pad=3, weight="bold", parse_math=False)
    bar = ScalarMappable(norm, cmap)
    page.color_bar(panels.flow.width + 0.1, ABOVE, side, bar, label=name)
    return page.figure


def similarity_measures(run: AnalysisRun) -> list[str]:
    """The measures that `similarity.npz` holds."""
    names = {key.rpartition("/")[2] for key in run.similarity}
    return sorted(name for name in names if not name.endswith(("_low", "_high")))


def layer_matrices(run: AnalysisRun, measure: str) -> dict[tuple[str, int], NDArray[np.float64]]:
    """Matrix of every layer that has heads; a layer that the file lacks is empty (all NaN)."""
    if measure not in similarity_measures(run):
        raise ConfigError(f"run {run.name}: {unknown('similarity', measure, similarity_measures(run))}")
    matrices = {}
    for site, counts in run.layout.items():
        for layer, count in enumerate(counts):
            key = f"{site}/{layer}/{measure}"
            matrix = run.similarity.get(key, np.full((count, count), np.nan))
            if matrix.shape != (count, count):
                raise RunError(
                    f"run {run.name}: similarity.npz holds {key} of shape {matrix.shape}, "
                    f"but the layer has {count} heads; analyse again"
                )
            matrices[site, layer] = matrix
    return matrices


def _scale(measure: str, matrices: Mapping[tuple[str, int], NDArray[np.float64]]) -> tuple[str, Normalize]:
    if measure == "cosine":
        return "RdBu_r", Normalize(-1, 1)
    if measure == "cka":
        return "viridis", Normalize(0, 1)
    largest = max((float(m[np.isfinite(m)].max(initial=0)) for m in matrices.values()), default=0)
    return "viridis_r", Normalize(0, largest or 1)


def _label(axes: Axes, heads: int, *, first: bool) -> None:
    step = 1 if heads <= 8 else 2 if heads <= 16 else 4
    ticks = np.arange(0, heads, step)
    axes.set_xticks(ticks + 0.5, [str(tick) for tick in ticks])
    axes.set_yticks(ticks + 0.5, [str(tick) for tick in ticks])
    axes.set_xlabel("head", size=LABEL, labelpad=1.5)
    if first:
        axes.set_ylabel("head", size=LABEL, labelpad=2)
