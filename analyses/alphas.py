"""Mixing matrices of models that mix heads linearly, and how far they are from the identity."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd
import torch
from torch import Tensor

from headscope.config.declarations import AnalysisFigure, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.mixing.base import head_matrices

SiteLayer = tuple[Site, int]


class Matrix(NamedTuple):
    """Numbers of one mixing matrix A [h h]; all are exact functions of it."""

    nuclear_norm: float
    off_diagonal: float
    skew_share: float
    from_identity: float
    singular_values: Tensor

    @classmethod
    def of(cls, alpha: Tensor) -> Matrix:
        """Nuclear norm Σσ; Σ_{i≠j}|a_ij| / Σ|a_ij|; ‖(A − Aᵀ)/2‖² / ‖A‖² and ‖A − I‖, both Frobenius; σ."""
        alpha = alpha.double()
        values = torch.linalg.svdvals(alpha)
        size, diagonal = alpha.abs().sum(), alpha.diagonal().abs().sum()
        skew = (alpha - alpha.T).square().sum() / 4
        apart = torch.linalg.matrix_norm(alpha - torch.eye(len(alpha), dtype=alpha.dtype))
        shares = ((size - diagonal) / size, skew / alpha.square().sum())  # NaN for a matrix of zeros
        return cls(float(values.sum()), float(shares[0]), float(shares[1]), float(apart), values)


@analysis
class Alphas(Analysis):
    """The matrices of models that mix heads linearly (MHR), entry by entry and as a whole.

    Row i makes new head i out of the old ones. `alpha_own` is a head's diagonal entry, `alpha_others` the share of its
    row off the diagonal, in absolute values. alphas.csv has every entry; alphas_modules.csv the nuclear norm Σσ, the
    off-diagonal share Σ_{i≠j}|a_ij| / Σ|a_ij|, the skew share ‖(A − Aᵀ)/2‖² / ‖A‖² and ‖A − I‖; alphas_spectrum.csv the
    singular values. Exact: low = high = value.
    """

    name = "alphas"
    order = 130
    summary = "the matrices of models that mix heads: nuclear norm, spectrum, off-diagonal and skew shares"
    measures = (
        Measure("alpha_own", "mixing weight on itself", signed=True),
        Measure("alpha_others", "share mixed in from others", range=(0, 1)),
    )
    figures = (
        AnalysisFigure(
            "alphas",
            "Matrices of models that mix heads, with their singular values; also of checkpoints, and from the fork's "
            "files.",
            "headscope.report.figures.layers:draw_alphas",
            from_pickle="headscope.report.fork:alphas_run",
            from_checkpoint="headscope.report.fork:checkpoint_alphas",
        ),
    )
    passes = frozenset()

    alphas: dict[SiteLayer, Tensor]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return None if alphas_of(checkpoint) else "is for models that mix heads by a matrix; this one does not"

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.alphas = alphas_of(checkpoint)
        for place, alpha in self.alphas.items():
            others = 1 - alpha.abs().diagonal() / alpha.abs().sum(dim=1)
            self.exact[place] = {"alpha_own": alpha.diagonal(), "alpha_others": others}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        matrices = {site_layer: Matrix.of(alpha) for site_layer, alpha in self.alphas.items()}
        report.tables["alphas"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "head": i, "source": j, "alpha": value}
            for (site, layer), alpha in self.alphas.items()
            for i, row in enumerate(alpha.tolist())
            for j, value in enumerate(row)
        )
        report.tables["alphas_modules"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "heads": len(matrix.singular_values), **matrix._asdict()}
            for (site, layer), matrix in matrices.items()
        ).drop(columns="singular_values")
        report.tables["alphas_spectrum"] = pd.DataFrame(
            {"site": site.value, "layer": layer, "index": index, "singular_value": value}
            for (site, layer), matrix in matrices.items()
            for index, value in enumerate(matrix.singular_values.tolist())
        )
        return report


def alphas_of(checkpoint: Checkpoint) -> dict[SiteLayer, Tensor]:
    """The mixing matrix [h h] of every (site, layer) that has one and has heads, in float64."""
    return {
        site_layer: matrix.detach().cpu().double() for site_layer, matrix in head_matrices(checkpoint.model).items()
    }
