"""Distinctness of the heads of a layer by their parameters: cosines, principal angles, effective ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate
from headscope.config.declarations import Measure
from headscope.distributed import widest
from headscope.engine.aggregate import gram
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis
from headscope.heads import SiteLayer
from headscope.model.projections import Slices

RANK = 1e-6  # ratio of smallest to largest singular value below which a slice lacks full rank
MATRICES = {"q": "query", "k": "key", "v": "value", "o": "output"}


@analysis
class Distinctness(Analysis):
    """Cosines and principal angles between heads' slices of W_Q, W_K, W_V, W_O; effective ranks.

    `cosine_q` … : mean cosine with the layer's other heads (slices flattened). `overlap_q` … : mean squared cosine of
    the principal angles between the spans (1: the same subspace), which no change of basis inside a head alters.
    `rank_qk`, `rank_ov`: exp H(σ/Σσ) of W_Qᵀ W_K and W_O W_V (Roy & Vetterli 2007), without rotary positions. Slices
    without full rank have no overlap. The table has every pair. Exact: low = high = value.
    """

    name = "distinctness"
    order = 120
    summary = "cosines, principal angles and effective ranks of the heads' own parameters"
    measures = (
        *(
            Measure(f"cosine_{name.lower()}", f"mean cosine of W_{name} with other heads", range=(-1, 1), signed=True)
            for name in "QKVO"
        ),
        *(
            Measure(f"overlap_{name.lower()}", f"subspace overlap of W_{name} with other heads", range=(0, 1))
            for name in "QKVO"
        ),
        Measure("rank_qk", "effective rank of W_QK", range=(0, None)),
        Measure("rank_ov", "effective rank of W_OV", range=(0, None)),
    )
    passes = frozenset()

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        columns: dict[str, dict[SiteLayer, Estimate]] = {}
        tables, missing = [], []
        for site_layer, projections in self.checkpoint.projections.items():
            slices = {letter: getattr(projections, name) for letter, name in MATRICES.items()}
            layer_name = f"{site_layer[0]}.{site_layer[1]}"
            missing += [f"{layer_name} W_{letter.upper()}" for letter, s in slices.items() if s is None]
            heads = self.checkpoint.layout[site_layer]
            factors_by_letter = {letter: FactoredSlices.of(units(s)) for letter, s in slices.items() if s is not None}
            for letter, factors in factors_by_letter.items():
                cosine, angles = (
                    pairs_of_heads(pairs, heads) for pairs in (cosines(factors.dots), principal_cosines(factors))
                )
                overlap = angles.square().mean(dim=-1)
                for name, pairs in (("cosine", cosine), ("overlap", overlap)):
                    itself = torch.eye(len(pairs), dtype=torch.bool)
                    mean_to_others = pairs.masked_fill(itself, torch.nan).nanmean(dim=-1)
                    columns.setdefault(f"{name}_{letter}", {})[site_layer] = Estimate.exact(mean_to_others)
                tables.append(_table(site_layer, letter, cosine, overlap, angles))
            for name, first, second in (("rank_qk", "q", "k"), ("rank_ov", "o", "v")):
                if first in factors_by_letter and second in factors_by_letter:
                    triangles = (factors_by_letter[letter].triangle for letter in (first, second))
                    of_heads = (part.repeat_interleave(heads // len(part), dim=0) for part in triangles)  # [h k k] each
                    rank = effective_rank(*of_heads)
                    columns.setdefault(name, {})[site_layer] = Estimate.exact(rank)
        remarks = [f"distinctness: the slices of {', '.join(missing[:4])} cannot be told"] if missing else []
        report_tables = {"distinctness": pd.concat(tables, ignore_index=True)} if tables else {}
        return AnalysisReport(columns=dict(sorted(columns.items())), tables=report_tables, remarks=remarks)


def units(slices: Slices) -> Tensor:
    """The slices [h k d] of all heads, or key/value groups, in float64; on the CPU if their device lacks float64."""
    matrices = slices.matrices()
    return (matrices if widest(matrices.device) == torch.float64 else matrices.cpu()).double()


def pairs_of_heads(pairs: Tensor, heads: int) -> Tensor:
    """Values of pairs of query heads [h h …] from those of pairs of units [u u …]; heads of a group share a unit."""
    shared = heads // len(pairs)
    return pairs.repeat_interleave(shared, dim=0).repeat_interleave(shared, dim=1)


@dataclass(frozen=True)
class FactoredSlices:
    """Slices [h k d], each factored as triangle [h k k] · basis, a basis of orthonormal rows (d rows where d < k).

    `inner` [p k k] are the products of the bases of each pair of heads (i < j), `dots` [h h] those of the flattened
    slices; `lacking` [h] marks slices without full rank.
    """

    triangle: Tensor
    inner: Tensor
    dots: Tensor
    lacking: Tensor

    @classmethod
    def of(cls, weights: Tensor) -> FactoredSlices:
        """Factor slices by QR on the CPU; only products of all rows are computed on the weights' device."""
        bases, upper = torch.linalg.qr(weights.cpu().transpose(1, 2))
        sizes = torch.linalg.svdvals(upper)  # [h k]
        lacking = sizes[:, -1] <= RANK * sizes[:, 0]
        first, second = torch.triu_indices(len(weights), len(weights), offset=1)
        inner = _products(bases.transpose(1, 2))[first, :, second]
        dots = _products(weights).diagonal(dim1=1, dim2=3).sum(dim=-1).cpu()
        return cls(upper.transpose(1, 2), inner, dots, lacking)


def _products(slices: Tensor) -> Tensor:
    """The products of all rows of slices [h k d] with each other: [h k h k]."""
    h, k, _ = slices.shape
    return gram(slices.flatten(0, 1).T).view(h, k, h, k)


def cosines(dots: Tensor) -> Tensor:
    """Cosine between flattened slices from their products [h h]: [h h]."""
    sizes = dots.diagonal().sqrt().clamp(min=1e-12)
    return dots / (sizes[:, None] * sizes)


def principal_cosines(slices: FactoredSlices) -> Tensor:
    """Cosines of the principal angles between slices, descending [h h k].

    NaN where a slice lacks full rank: its basis would hold arbitrary directions.
    """
    h, k = len(slices.triangle), slices.inner.shape[-1]
    first, second = torch.triu_indices(h, h, offset=1)
    squares = torch.linalg.eigvalsh(slices.inner @ slices.inner.transpose(1, 2))  # cheaper than singular values
    pair_cosines = squares.flip(-1).clamp(0, 1).sqrt()  # [p k]
    matrix: Tensor = pair_cosines.new_ones(h, h, k)
    matrix[first, second] = matrix[second, first] = pair_cosines
    matrix[slices.lacking] = matrix[:, slices.lacking] = torch.nan
    return matrix


def effective_rank(first: Tensor, second: Tensor) -> Tensor:
    """exp of the entropy of the normalised singular values of leftᵀ right, from their triangles [h k k]: [h]."""
    values = torch.linalg.svdvals(first.transpose(1, 2) @ second)  # [h k]
    share = values / values.sum(dim=-1, keepdim=True)
    return torch.special.entr(share).sum(dim=-1).exp()


def _table(site_layer: SiteLayer, letter: str, cosine: Tensor, overlap: Tensor, angles: Tensor) -> pd.DataFrame:
    """A row for each pair of heads of one layer and matrix."""
    first, second = np.triu_indices(len(cosine), k=1)
    outer = angles.numpy()[first, second][:, [0, -1]] if len(first) else np.empty((0, 2))
    degrees = np.degrees(np.arccos(outer))
    return pd.DataFrame(
        {
            "site": site_layer[0].value,
            "layer": site_layer[1],
            "matrix": f"W_{letter.upper()}",
            "head_a": first,
            "head_b": second,
            "cosine": cosine.numpy()[first, second],
            "overlap": overlap.numpy()[first, second],
            "angle_smallest": degrees[:, 0],
            "angle_largest": degrees[:, 1],
        }
    )
