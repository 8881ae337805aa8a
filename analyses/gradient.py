"""Gradients of the objective with respect to each head's gate: Michel et al. 2019, Molchanov et al. 2019."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import option
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_table

LEAST_SENSITIVE = "the objective is least sensitive to their gates"
Granularity = Literal["token", "example", "batch"]


@dataclass(frozen=True)
class GradientOptions:
    """Options of analyses that sum gradients."""

    granularity: Granularity = option("example", "What gradients are summed over before they lose their sign.")


class _OfGradients(Analysis):
    reads = "contexts"
    group = "importance"
    default = False
    needs = frozenset({"gradient"})
    Options = GradientOptions
    signature_entry = "grain:{granularity}"


@analysis
class Gradient(_OfGradients):
    """Mean of |∂L/∂ξ| for the gate ξ = 1 on a head's context (Michel et al. 2019, §3.3).

    `gradient` is divided by the l2 norm of its layer: a share within the layer. `gradient_raw` is not, and orders heads
    of all layers. ∂L/∂ξ = Σ context · ∂L/∂context, summed before the absolute value over a sentence (`granularity
    example`, the formula), a position (`token`, the authors' programs) or a batch (`batch`). Sums over all sentences
    are divided by the number of predictions. Special tokens take part. The table has the signed mean too.
    """

    name = "gradient"
    version = 2
    order = 200
    summary = "sensitivity of the objective to a head's gate (Michel et al. 2019)"
    measures = (
        Measure(
            "gradient",
            "gradient of the gate",
            range=(0, 1),
            overview=4,
            keep="highest",
            why=LEAST_SENSITIVE,
            within_layer=True,
            across="gradient_raw",
        ),
        Measure(
            "gradient_raw",
            "raw gradient of the gate",
            range=(0, None),
            keep="highest",
            why=LEAST_SENSITIVE,
        ),
    )

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        gates, counts, per_batch = gate_gradients(heads, self.options.granularity)
        return {
            "gradient": Ratio(gates.abs().sum(dim=-1), counts, per_batch=per_batch),
            "gradient_signed": Ratio(position_gates(heads).sum(dim=-1), heads.counts[:, None]),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        shares, raw = aggregates.function("gradient", normalize_rows), aggregates.column("gradient")
        signed = aggregates.column("gradient_signed")
        table = {
            site_layer: {"gradient": shares[site_layer].value, "raw": raw[site_layer], "signed": signed[site_layer]}
            for site_layer in raw
        }
        columns = {"gradient": shares, "gradient_raw": raw}
        return AnalysisReport(columns=columns, tables={"gradient": head_table(table)})


def position_gates(heads: HeadBatch) -> Tensor:
    """∂L/∂ξ of every position [b h t]: context · gradient, zero for padding."""
    real = heads.query_side.real[:, None].to(heads.context.dtype)
    return torch.einsum("bhtk,bhtk->bht", heads.context, heads.gradient) * real


def gate_gradients(heads: HeadBatch, granularity: Granularity) -> tuple[Tensor, Tensor, bool]:
    """∂L/∂ξ of every unit [u h n], its counts, and whether the unit is the whole batch instead of a sentence.

    "token": u = b, n positions, counts [b 1] of real positions. "example": u = b, n = 1, counts [b 1] of predictions.
    "batch": u = n = 1, counts [1 1] of predictions.
    """
    gates = position_gates(heads)  # [b h t]
    if granularity == "token":
        return gates, heads.query_side.real.sum(dim=-1, keepdim=True), False
    gates, counts = gates.sum(dim=-1, keepdim=True), heads.counts[:, None]
    if granularity == "example":
        return gates, counts, False
    return gates.sum(dim=0, keepdim=True), counts.sum(dim=0, keepdim=True), True


def normalize_rows(total: Tensor, count: Tensor) -> Tensor:
    """Means [r h] over the l2 norm of their layer; 0 where the whole layer is 0."""
    means = total / count
    length: Tensor = means.norm(dim=-1, keepdim=True)
    return means / length.clamp(min=torch.finfo(means.dtype).tiny)


@analysis
class Taylor(_OfGradients):
    """Mean of (∂l/∂ξ)² for the gate ξ = 1 on a head's context (Molchanov et al. 2019, §3.2).

    First-order squared change of the objective when the context becomes zero. l is a mean over a sentence's
    predictions, or a batch's (`granularity=batch`); `token`: per position. Not normalised per layer.
    """

    name = "taylor"
    order = 201
    summary = "squared first-order effect of a head's removal on the objective (Molchanov et al. 2019)"
    measures = (
        Measure(
            "taylor",
            "Taylor importance",
            range=(0, None),
            keep="highest",
            why="their squared first-order effect on the objective is smallest",
        ),
    )

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        gates, counts, per_batch = gate_gradients(heads, self.options.granularity)
        squares = gates.square()
        if self.options.granularity != "token":
            squares = squares / counts.clamp(min=1)[..., None]  # n · (gate / n)²
        return {"taylor": Ratio(squares.sum(dim=-1), counts, per_batch=per_batch)}
