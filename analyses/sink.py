"""Attention sinks: the mean weight on the first key and on special tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.engine.declarations import HeadFunction, Measure
from headscope.engine.evidence.labels import LabelTests, evidence_signature
from headscope.engine.evidence.significance import above_chance
from headscope.heads import Site

THRESHOLD, TIMES_CHANCE = 0.5, 2.0


@analysis
class Sink(Analysis):
    """Mean over queries of the weight on the first key (`sink`, Xiao et al. 2023) and on special tokens.

    The first position itself does not count as a query of self attention: in a causal model it can only
    look at itself. A head is labelled `sink` if `sink` or `sink_special` is at least 0.5, and twice what it would be if
    every query looked at all it sees alike (in short sentences much lies on special tokens anyhow), on the evidence of
    `headscope.engine.evidence.labels`: two tests a head, whose p is the larger of both.
    """

    name = "sink"
    version = 2
    order = 90
    summary = "mean weight on the first key, and on special tokens"
    measures = (
        Measure("sink", "weight on the first key", range=(0, 1)),
        Measure("sink_special", "weight on special tokens", range=(0, 1)),
    )
    functions = (HeadFunction("sink", "▼", "s", "#cc79a7", "sink: looks at first or special tokens", order=7),)
    Options = LabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        special = heads.shared("special", lambda: heads.key_side.special.to(heads.weights.dtype)[:, :, None])  # [b s 1]
        later = heads.shared("later", lambda: _later(heads))  # [b t]
        even = heads.shared("even", lambda: _even(heads))  # [b t s]
        on_special = (heads.weights.flatten(1, 2) @ special).view(heads.weights.shape[:-1])  # [b h t]
        weights = {"sink": heads.weights[..., 0], "sink_special": on_special}
        evenly = {"sink": even[..., 0], "sink_special": (even @ special)[..., 0]}
        ratios = {name: heads.over_queries(weight, only=later) for name, weight in weights.items()}
        for name, weight in evenly.items():
            ratios[f"{name}_chance"] = heads.over_queries(weight[:, None].expand_as(on_special), only=later)
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport(columns=[aggregates.column(name) for name in ("sink", "sink_special")])
        tests = LabelTests(self.options.min_instances)
        for column in report.columns:
            for site_layer, share in column.estimates.items():
                weight, count = aggregates.by_sentence(column.name, site_layer)
                evenly, _ = aggregates.by_sentence(f"{column.name}_chance", site_layer)
                p, threshold = above_chance(weight, evenly, count, threshold=THRESHOLD, times=TIMES_CHANCE)
                chance = (evenly.sum(dim=0) / count.sum(dim=0)).numpy()
                tests.add(site_layer, column.name, "sink", share, p, threshold=threshold, counts=count, baseline=chance)
        tests.conclude(report)
        return report

    def signature(self) -> dict[str, str]:
        return evidence_signature(self.options)


def _later(heads: HeadBatch) -> Tensor:
    """The queries of which `sink` is a mean: in self attention not the first position."""
    counted = torch.ones_like(heads.queries)
    if heads.site is not Site.CROSS:
        counted[:, 0] = False
    return counted


def _even(heads: HeadBatch) -> Tensor:
    """The weights of queries that look at all they see alike [b t s]."""
    visible = heads.visible.to(heads.weights.dtype)
    return visible / visible.sum(dim=-1, keepdim=True).clamp(min=1)
