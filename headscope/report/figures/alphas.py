"""Matrices that mix heads, one a module, with their singular values beside them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.ticker import MaxNLocator

from headscope.report.charts import Array, centred_limits, draw_bars, draw_cells, number_cells
from headscope.report.sheet import Sheet
from headscope.results.study import Study
from headscope.results.study_tables import MissingTable

COLOR = "#0072b2"
SPECTRUM = 7.0
"""Ems of the singular values beside a matrix."""
Matrices = Mapping[tuple[str, int], Array]


def draw_alphas(run: Study, sheet: Sheet, _: object) -> None:
    """Every module's matrix on one scale centred at zero, and its singular values on one scale from zero."""
    matrices = alpha_matrices(run)
    heads = max(len(matrix) for matrix in matrices.values())
    side = max(12.0, min(2.2 * heads, 18.0))
    norm = centred_limits(list(matrices.values()))
    spectra = {key: np.asarray(np.linalg.svd(matrix, compute_uv=False), float) for key, matrix in matrices.items()}
    largest = max(float(values.max(initial=0)) for values in spectra.values()) or 1.0
    titles = [title for key in matrices for title in (f"{key[0]} · layer {key[1]}", f"Σσ {spectra[key].sum():.1f}")]
    sites = [site for site, _ in matrices]
    starts = {2 * number for number in range(1, len(sites)) if sites[number] != sites[number - 1]}
    sizes = [(side, side), (SPECTRUM, side)] * len(matrices)
    panels = sheet.panels(titles, sizes, starts=starts, bar=True, beside=3.5, share="", group=2)
    for key, axes, beside in zip(matrices, panels[::2], panels[1::2], strict=True):
        count = len(matrices[key])
        shades = draw_cells(axes, matrices[key], cmap="RdBu_r", norm=norm, edge=heads <= 12)
        number_cells(axes, x=count, y=count)
        draw_bars(beside, np.arange(count), {"_": (COLOR, spectra[key])}, level=True)
        beside.set(xlim=(0, largest * 1.05), ylim=(count - 0.5, -0.5), yticks=[], xlabel="σ")
        beside.xaxis.set_major_locator(MaxNLocator(2))
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
