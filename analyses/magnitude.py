"""Norms of each head's parameters."""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.bootstrap import Estimate
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, Column, RunOptions, analysis, head_table
from headscope.formats.base import Checkpoint
from headscope.heads import Site
from headscope.model.projections import Slices

MATRICES = {"q": "query", "k": "key", "v": "value", "o": "output"}


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

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.norms: dict[tuple[Site, int], dict[str, Tensor]] = {}

    def inspect(self, checkpoint: Checkpoint) -> None:
        for site_layer, projections in checkpoint.projections.items():
            heads = checkpoint.layout[site_layer]
            self.norms[site_layer] = {
                letter: _norms(getattr(projections, name), heads) for letter, name in MATRICES.items()
            }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        output = {place: Estimate.exact(norms["o"]) for place, norms in self.norms.items()}
        product = {
            place: Estimate.exact(torch.stack(list(norms.values())).prod(dim=0)) for place, norms in self.norms.items()
        }
        table = head_table(
            {place: {f"norm_{letter}": part for letter, part in norms.items()} for place, norms in self.norms.items()}
        )
        columns = [Column("magnitude", output), Column("magnitude_all", product)]
        return AnalysisReport(columns=columns, tables={"magnitude": table})


def _norms(slices: Slices | None, heads: int) -> Tensor:
    if slices is None:
        return torch.full((heads,), torch.nan, dtype=torch.float64)
    norms: Tensor = slices.matrices().cpu().double().flatten(1).norm(dim=-1)
    return norms.repeat_interleave(heads // len(slices.units), dim=0)
