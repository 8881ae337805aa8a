"""Attention sinks: the mean weight on the first key and on special tokens."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
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
    reads = "statistics"
    joins_layers = True
    version = 3
    order = 90
    summary = "mean weight on the first key, and on special tokens"
    measures = (
        Measure("sink", "weight on the first key", range=(0, 1)),
        Measure("sink_special", "weight on special tokens", range=(0, 1)),
    )
    functions = (HeadFunction("sink", "▼", "s", "#cc79a7", "sink: looks at first or special tokens", order=7),)
    Options = LabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        later = heads.shared("later", lambda: _later(heads))  # [b t]
        columns = heads.once("sinks", lambda: _sinks(heads))  # [b s 2]
        weight = heads.weight_on(columns)  # [b h t 2]
        even = heads.shared("evenly", lambda: heads.over_queries(_evenly_on(heads, columns), only=later))
        ratios: dict[str, Ratio] = {}
        for place, name in enumerate(("sink", "sink_special")):
            ratios[name] = heads.over_queries(weight[..., place], only=later)
            chance = even.total[:, place, None].expand(weight.shape[:2])
            ratios[f"{name}_chance"] = Ratio(chance, even.count)
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
    """The queries of which `sink` is a mean, on the CPU: in self attention not the first position."""
    later = heads.host_queries.clone()
    later[:, : 0 if heads.site is Site.CROSS or heads.first_query else 1] = False
    return later


def _sinks(heads: HeadBatch) -> Tensor:
    """The indicators of the first key, and of special tokens [b s 2], on the CPU."""
    special = heads.host_sides[1].special
    first = (torch.arange(special.shape[1]) == 0).expand_as(special)
    return torch.stack([first, special], dim=-1).to(heads.context.dtype)


def _evenly_on(heads: HeadBatch, columns: Tensor) -> Tensor:
    """What queries that look at all they see alike have on columns [b s n]: [b n t]."""
    visible = heads.visible_on(torch.nn.functional.pad(columns, (0, 1), value=1.0))  # [b t n+1]
    return (visible[..., :-1] / visible[..., -1:].clamp(min=1)).transpose(1, 2)
