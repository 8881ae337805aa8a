"""Attention distance: the mean distance between a query and the key with its largest weight."""

from __future__ import annotations

from collections.abc import Mapping

from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.heads import Site


@analysis
class Distance(Analysis):
    """Mean over queries of |query − argmax key|, in subwords; for self attention.

    Special tokens are left out as queries and as keys, as for `confidence`: a query whose weight is on one is measured
    by its largest weight among the others, however small, and by the first of them where all are zero. So a head that
    looks exactly one token ahead has not 1 but 2 − 2/n over a sentence of n tokens between special ones: n − 1 queries
    at distance 1, and the last, whose next token is the end of the sentence, at n − 1. In the same way the distance of
    heads that look at special tokens (`sink_special`) is that of small remainders. `offset` and `offset_share` count
    at each offset only queries that have a key there.
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
