"""Taylor importance: the squared first-order effect of removing a head (Molchanov et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.analyses.gradient import GradientOptions, gate_gradients
from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Analysis, HeadBatch, analysis


@analysis
class Taylor(Analysis):
    """Mean of (∂l/∂ξ)² for the gate ξ = 1 on a head's context (Molchanov et al. 2019, §3.2).

    First-order squared change of the objective when the context becomes zero. l is a mean over a sentence's
    predictions, or a batch's (`granularity=batch`); `token`: per position. Not normalised per layer.
    """

    name = "taylor"
    reads = "contexts"
    group = "importance"
    order = 201
    default = False
    needs = frozenset({"gradient"})
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
    Options = GradientOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        gates, counts, per_batch = gate_gradients(heads, self.options.granularity)
        squares = gates.square()
        if self.options.granularity != "token":
            squares = squares / counts.clamp(min=1)[..., None]  # n · (gate / n)²
        return {"taylor": Ratio(squares.sum(dim=-1), counts, per_batch=per_batch)}

    def signature(self) -> dict[str, str]:
        return {"grain": self.options.granularity}
