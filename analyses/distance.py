"""Attention distance: the mean distance between a query and the key with its largest weight."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.heads import Site


@analysis
class Distance(Analysis):
    """Mean over queries of |query − argmax key| in subwords; self-attention.

    Special tokens are left out as queries and keys: a query whose weight is on one is measured by its largest weight
    among the others. So a head that always looks one token ahead has 2 − 2/n over n tokens, and a sink has the distance
    of small remainders.
    """

    name = "distance"
    reads = "rows"
    order = 30
    summary = "mean distance to the key with the largest weight"
    measures = (Measure("distance", "mean distance of the argmax", unit="tokens", range=(0, None)),)
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        distances = heads.offsets.abs().to(heads.max_weight.dtype)  # [b h t]
        return {"distance": heads.over_queries(distances)}
