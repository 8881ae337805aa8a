"""Norms of each head's parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.bootstrap import Estimate
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, analysis, head_table
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.projections import Slices

MATRICES = (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output"))


@analysis
class Magnitude(Analysis):
    """Frobenius norms of a head's slices: `magnitude` of W_O, `magnitude_all` the product of all four.

    Without biases; heads of a group share W_K and W_V. The product does not change when W_O is scaled up and W_V down.
    Exact: low = high = value.
    """

    name = "magnitude"
    group = "importance"
    order = 202
    default = False
    passes = frozenset()
    summary = "norm of a head's slice of W_O, and product of the norms of all four slices"
    measures = (
        Measure(
            "magnitude", "norm of W_O", range=(0, None), keep="highest", why="their slices of W_O are the smallest"
        ),
        Measure(
            "magnitude_all",
            "norms of all four slices",
            range=(0, None),
            keep="highest",
            why="the slices of their four matrices are the smallest",
        ),
    )

    norms: dict[tuple[Site, int], dict[str, Tensor]]

    def inspect(self, checkpoint: Checkpoint) -> None:
        self.norms = {
            place: {f"norm_{letter}": _norms(getattr(of, name), checkpoint.layout[place]) for letter, name in MATRICES}
            for place, of in checkpoint.projections.items()
        }
        products = {place: torch.stack([*norms.values()]).prod(dim=0) for place, norms in self.norms.items()}
        self.exact["magnitude"] = {place: Estimate.exact(norms["norm_o"]) for place, norms in self.norms.items()}
        self.exact["magnitude_all"] = {place: Estimate.exact(product) for place, product in products.items()}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        report.tables["magnitude"] = head_table(self.norms)
        return report


def _norms(slices: Slices | None, heads: int) -> Tensor:
    if slices is None:
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    norms: Tensor = slices.matrices().cpu().double().flatten(1).norm(dim=-1)
    return norms.repeat_interleave(heads // len(slices.units), dim=0)
