"""Entropy of attention weights, in nats and as a share of the maximum."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_ids

EVEN = 1e-6  # share of the largest entropy that heads which weigh all keys alike may lack: rounding


@analysis
class Entropy(Analysis):
    """Mean over queries of −Σ_s w ln w in nats (Ghader & Monz 2017), and of that over ln(visible keys).

    Special tokens are no queries; sums run over all visible keys. Queries that see one key count for `entropy` only.
    Heads that weigh all keys alike are named in a remark: their argmax is that of the first key.
    """

    name = "entropy"
    reads = "rows"
    order = 20
    summary = "entropy of the attention weights, in nats and as a share of the maximum"
    measures = (
        Measure(
            "entropy", "entropy", unit="nats", range=(0, None), keep="lowest", why="they spread their attention most"
        ),
        Measure("entropy_share", "entropy / its maximum", range=(0, 1), overview=3),
    )

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        entropy = heads.entropy
        largest, several = heads.shared("largest entropy", lambda: _largest(heads))
        return {
            "entropy": heads.over_queries(entropy),
            "entropy_share": heads.over_queries(entropy / largest, only=several),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        shares = report.columns["entropy_share"]
        even = [
            str(head)
            for site_layer, share in shares.items()
            for head in head_ids(site_layer, len(share.value))
            if share.value[head.head] > 1 - EVEN
        ]
        if even:
            examples = ", ".join(even[:4]) + (" …" if len(even) > 4 else "")
            report.remarks.append(
                f"entropy: {len(even)} heads weigh all keys alike ({examples}), so that they point nowhere: distance, "
                "offset and other measures of their largest weight are those of the first key"
            )
        return report


def _largest(heads: HeadBatch) -> tuple[Tensor, Tensor]:
    """The largest entropy that the rows of queries can have [b 1 t], and which queries see more than one key [b t]."""
    visible_keys = heads.visible_on(heads.context.new_ones(*heads.keys.shape, 1))[..., 0]
    return visible_keys.clamp(min=2).log()[:, None], visible_keys > 1
