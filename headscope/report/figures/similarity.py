"""How alike the heads of a layer are: one [h h] matrix a layer, on one scale for all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from headscope.config.declarations import Measure, pair_measures
from headscope.errors import ConfigError
from headscope.registry import unknown
from headscope.report.charts import Array, draw_cells, measure_limits, number_cells
from headscope.report.grid import layer_panels
from headscope.report.sheet import Sheet
from headscope.results.study import Study


def draw_similarity(run: Study, sheet: Sheet, options: Any) -> None:
    """Heads × heads of every layer; cosine diverges around 0, CKA and divergence have ends, distances start at 0.

    `options` are those of the analysis: without a `measure` cosine, or the first one of a run that has no cosine;
    `range` is another scale.
    """
    name = options.measure or min(similarity_measures(run), key=lambda kind: kind != "cosine", default="cosine")
    # what a head is to itself says nothing and would set the scale
    matrices = {
        layer: np.where(np.eye(len(matrix), dtype=bool), np.nan, matrix)
        for layer, matrix in layer_matrices(run, name).items()
    }
    heads = max((len(matrix) for matrix in matrices.values()), default=1)
    valued = {layer for layer, matrix in matrices.items() if np.isfinite(matrix).any()} or set(matrices)
    measure = replace(pair_measures().get(name) or Measure(name), range=(None, None))
    norm = measure_limits(measure, list(matrices.values()), options.range)
    side = max(10.0, min(2.3 * heads, 17.0))
    panels = layer_panels(sheet, run, (side, side), valued, bar=True)
    for key, axes in panels.items():
        shades = draw_cells(axes, matrices[key], cmap=measure.cmap, norm=norm, edge=heads <= 12)
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
