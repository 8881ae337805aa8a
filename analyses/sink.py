"""Attention sinks: the mean weight on the first key and on special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.data.encoded import side_names
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, LabelRule, RunOptions, analysis
from headscope.heads import Site

RESTING = 0.9
HALF = 0.5 - 1e-6  # what rounding makes of half
MEASURES = ("sink", "sink_special")


@analysis
class Sink(Analysis):
    """Mean over queries of the weight on the first key (`sink`, Xiao et al. 2023) and on special tokens.

    The first position is no query in self-attention. `sink_queries`, `sink_special_queries`: shares of queries with
    half of their weight there; from 0.9 on the head is said to rest there, whatever the query.

    Label `sink`: `sink` or `sink_special` of at least 0.5, and twice that of even weights.
    """

    name = "sink"
    reads = "rows"
    version = 4
    order = 90
    summary = "mean weight on the first key, and on special tokens"
    measures = (
        Measure("sink", "weight on the first key", range=(0, 1)),
        Measure("sink_special", "weight on special tokens", range=(0, 1)),
        Measure("sink_queries", "queries with half of their weight on the first key", range=(0, 1)),
        Measure("sink_special_queries", "queries with half of their weight on special tokens", range=(0, 1)),
    )
    functions = (HeadFunction("sink", "▼", "s", "#cc79a7", "sink: looks at first or special tokens", order=7),)
    Options = LabelOptions
    merges = ("first", "special")

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.first: dict[Site, set[int]] = {}
        self.special: dict[Site, set[int]] = {}

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        heads.cached_per_batch("sink ids", lambda: self._note_ids(heads))
        later = heads.shared("later", lambda: _later(heads))  # [b t]
        columns = heads.cached_per_batch("sinks", lambda: _sinks(heads))  # [b s 2]
        weight = heads.weight_on(columns)  # [b h t 2]
        even = heads.shared("evenly", lambda: heads.over_queries(heads.evenly_on(columns), only=later))
        resting = (weight >= HALF).to(weight.dtype)
        ratios = {name: heads.over_queries(weight[..., place], only=later) for place, name in enumerate(MEASURES)}
        for place, name in enumerate(MEASURES):
            ratios[f"{name}_queries"] = heads.over_queries(resting[..., place], only=later)
            ratios[f"{name}_chance"] = Ratio(even.total[:, place, None].expand(weight.shape[:2]), even.count)
        return ratios

    def rules(self) -> Sequence[LabelRule]:
        return [LabelRule("sink", name, 0.5, chance=f"{name}_chance") for name in MEASURES]

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        shares = {name: report.columns[f"{name}_queries"] for name in MEASURES if f"{name}_queries" in report.columns}
        by_head: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in report.evidence:
            by_head.setdefault((row["site"], row["layer"], row["head"], row["given"]), []).append(row)
        for (site, layer, head, _), rows in by_head.items():
            resting = {name: float(of[Site(site), layer].value[head]) for name, of in shares.items()}
            text = self._description(Site(site), rows, resting)
            for row in rows:
                row["description"] = text
        return report

    def _description(self, site: Site, rows: Sequence[Mapping[str, Any]], resting: Mapping[str, float]) -> str:
        """Where a head rests, whatever the query; or its weight there on average. `rows` are of one head."""
        for row in rows:
            if resting[row["measure"]] >= RESTING:
                share = f"{resting[row['measure']]:.2f} of its queries give half of their weight or more"
                return f"rests on {self._place(site, row['measure'])}, whatever the query: {share}"
        return f"{rows[0]['value']:.2f} of its weight, on average, is on {self._place(site, rows[0]['measure'])}"

    def _place(self, site: Site, measure: str) -> str:
        """The keys that a measure is about, by name where they are the same special tokens in all sentences."""
        special = self.special[site]
        words, tokens = ("the first token", self.first[site]) if measure == "sink" else ("special tokens", special)
        if len(tokens) == 1 and tokens <= special:
            return self.checkpoint.subwords([*tokens], side=side_names(site)[1])[0] or words
        return words

    def _note_ids(self, heads: HeadBatch) -> None:
        side = heads.batch.on_host.sides(heads.site)[1]
        self.first.setdefault(heads.site, set()).update(side.ids[:, 0].tolist())
        self.special.setdefault(heads.site, set()).update(side.ids[side.special & side.real].unique().tolist())


def _later(heads: HeadBatch) -> Tensor:
    """The queries of which `sink` is a mean: in self attention not the first position."""
    later = heads.queries.clone()
    later[:, : 0 if heads.site is Site.CROSS or heads.first_query else 1] = False
    return later


def _sinks(heads: HeadBatch) -> Tensor:
    """The indicators of the first key, and of special tokens [b s 2]."""
    special = heads.key_side.special
    first = (torch.arange(special.shape[1], device=special.device) == 0).expand_as(special)
    return torch.stack([first, special], dim=-1).to(heads.context.dtype)
