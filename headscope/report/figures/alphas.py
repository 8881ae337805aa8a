"""Matrices that mix heads, one a module, with their singular values beneath."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from headscope.report.layout.grid import centred_limits, draw_cells, square_ticks
from headscope.report.layout.output import cell_pitch, widest
from headscope.report.layout.page import BAR, LABEL, RULE, TICK, Page
from headscope.report.layout.panels import Panels
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable, RunError

LEFT, ABOVE, BETWEEN, BARS, BELOW = 0.42, 0.2, 0.29, 0.42, 0.14
COLOR = "#0072b2"
Matrices = Mapping[tuple[str, int], NDArray[np.float64]]


def alphas_figure(run: Study) -> Figure:
    """Every module's matrix on one scale centred at zero, and its singular values on one scale from zero."""
    matrices = alpha_matrices(run)
    heads = max(len(matrix) for matrix in matrices.values())
    pitch = cell_pitch(max(0.09, min(0.2, 1.6 / heads)), heads, besides=LEFT + BAR)
    side = heads * pitch
    height = ABOVE + side + BETWEEN + BARS + BELOW
    panels = Panels.plan(run, (LEFT + side, height), widest=widest(12.6, besides=BAR), only=matrices)
    page = Page(
        panels.flow.width + BAR,
        panels.flow.height,
        title="Matrices that mix heads, and their singular values",
        subtitle=f"{run.model} · row: new head, column: head it is made of",
        footer=run.signature,
    )
    norm = centred_limits(list(matrices.values()))
    spectra = {
        site_layer: np.asarray(np.linalg.svd(matrix, compute_uv=False), dtype=np.float64)
        for site_layer, matrix in matrices.items()
    }
    largest = max(float(values.max(initial=0)) for values in spectra.values()) or 1.0
    for panel, (left, top) in panels:
        site, layer, count = panel
        extent = side * count / heads
        axes = panels.axes(page, panel, left + LEFT, top + ABOVE, extent, extent)
        draw_cells(axes, matrices[site, layer], cmap="RdBu_r", norm=norm, edge=0.3 if heads <= 12 else 0)
        square_ticks(axes, count, pitch)
        below = page.axes(left + LEFT, top + ABOVE + extent + BETWEEN, extent, BARS)
        _draw_spectrum(below, spectra[site, layer], largest, first=left == 0)
    bar = ScalarMappable(norm, "RdBu_r")
    page.color_bar(panels.flow.width + 0.1, ABOVE, side, bar, label="weight")
    return page.finished()


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
        if len(table) != count * count or not table["source"].between(0, count - 1).all():
            raise RunError(f"run {run.name}: alphas.csv has not {count} × {count} entries for {site}.{layer}")
        matrix = np.full((count, count), np.nan)
        matrix[table["head"].to_numpy(int), table["source"].to_numpy(int)] = table["alpha"]
        matrices[str(site), int(layer)] = matrix
    if not matrices or not all(np.isfinite(matrix).all() for matrix in matrices.values()):
        raise MissingTable(f"run {run.name}: alphas.csv has no complete matrix; analyse again")
    return matrices


def _draw_spectrum(axes: Axes, values: NDArray[np.float64], largest: float, *, first: bool) -> None:
    """Bars from the largest to the smallest; their sum, the nuclear norm, in the corner."""
    axes.bar(np.arange(len(values)) + 0.5, values, width=0.8, color=COLOR)
    axes.set(xlim=(0, len(values)), ylim=(0, largest * 1.05), xticks=[])
    axes.yaxis.set_major_locator(MaxNLocator(2))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=1.5, width=0.4, color=RULE)
    if first:
        axes.set_ylabel("σ", size=LABEL, labelpad=2)
    axes.set_title(f"Σσ = {values.sum():.1f}", size=TICK, loc="right", pad=2)
