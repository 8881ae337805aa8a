"""Attention sinks: the mean weight on the first key and on special tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_ids
from headscope.engine.declarations import HeadFunction, Measure
from headscope.heads import Site

THRESHOLD = 0.5


@analysis
class Sink(Analysis):
    """Mean over queries of the weight on the first key (`sink`, Xiao et al. 2023) and on special tokens.

    The first position itself does not count as a query of self attention: in a causal model it can only
    look at itself. A head whose `sink` or `sink_special` is at least 0.5 is labelled `sink`.
    """

    name = "sink"
    order = 90
    summary = "mean weight on the first key, and on special tokens"
    measures = (Measure("sink", "weight on the first key"), Measure("sink_special", "weight on special tokens"))
    functions = (HeadFunction("sink", "▼", "s", "#cc79a7", "sink: looks at first or special tokens", order=7),)

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        special = heads.shared("special", lambda: heads.key_side.special.to(heads.weights.dtype)[:, :, None])  # [b s 1]
        later = heads.shared("later", lambda: _later(heads))  # [b t]
        on_special = (heads.weights.flatten(1, 2) @ special).view(heads.weights.shape[:-1])  # [b h t]
        return {
            "sink": heads.over_queries(heads.weights[..., 0], only=later),
            "sink_special": heads.over_queries(on_special, only=later),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        first, special = (column.estimates for column in report.columns)
        for site_layer in first:
            for head in head_ids(site_layer, len(first[site_layer].value)):
                if max(first[site_layer].value[head.head], special[site_layer].value[head.head]) >= THRESHOLD:
                    report.label(head, "sink")
        return report


def _later(heads: HeadBatch) -> Tensor:
    """The queries of which `sink` is a mean: in self attention not the first position."""
    counted = torch.ones_like(heads.queries)
    if heads.site is not Site.CROSS:
        counted[:, 0] = False
    return counted
