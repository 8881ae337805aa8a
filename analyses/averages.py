"""Heads that average: even weight over what follows a query, or over what precedes it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.description.examples import SEVERAL
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.engine.evidence.label_words import Rate
from headscope.engine.evidence.labels import LabelTests, evidence_signature
from headscope.engine.evidence.significance import above_chance, share_p
from headscope.heads import Site

EVEN, SIDE, TIMES = 0.95, 0.5, 1.25
SIDES = ("after", "before")


@analysis
class Averages(Analysis):
    """How even a query's weights are on the keys of one side, and how much weight that side has.

    For queries with n ≥ 5 counted keys on the side, with weights w: `…_evenness` is the entropy of w / Σ w over ln n,
    `…_weight` is Σ w. Encoders only: in a causal model all keys precede.

    Label `averages:after` or `averages:before`: evenness of at least 0.95, and weight of at least a half and 1.25 times
    that of even weights on all visible keys. A head that weighs all keys alike has neither.
    """

    name = "averages"
    reads = "rows"
    order = 95
    summary = "evenness of the weights on what follows and on what precedes a query"
    sites = frozenset({Site.ENCODER_SELF})
    measures = tuple(
        Measure(f"{side}_{what}", f"{title} on keys {side} the query", range=(0, 1))
        for side in SIDES
        for what, title in (("evenness", "evenness of weights"), ("weight", "weight"))
    )
    functions = (HeadFunction("averages", "▬", "a", "#ee7733", "averages: weighs all of one side alike", order=8),)
    Options = LabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        ratios: dict[str, Ratio] = {}
        for side in SIDES:
            keys, largest, several, chance = heads.shared(side, lambda side=side: _keys(heads, side))  # type: ignore[misc]
            weight, surprise = (torch.einsum("bhts,bts->bht", of, keys) for of in (heads.weights, heads.surprise))
            weight = weight.clamp(min=torch.finfo(keys.dtype).tiny)
            entropy = surprise / weight + weight.log()  # of w / Σ w
            values = {"evenness": (entropy / largest).clamp(0, 1), "weight": weight, "chance": chance.expand_as(weight)}
            ratios |= {f"{side}_{name}": heads.over_queries(value, only=several) for name, value in values.items()}
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport(columns=[aggregates.column(measure.name) for measure in self.measures])
        columns = {column.name: column for column in report.columns}
        tests = LabelTests(self.options.min_instances)
        for side in SIDES:
            for site_layer, evenness in columns[f"{side}_evenness"].estimates.items():
                even, count = aggregates.by_sentence(f"{side}_evenness", site_layer)
                weight, _ = aggregates.by_sentence(f"{side}_weight", site_layer)
                evenly, _ = aggregates.by_sentence(f"{side}_chance", site_layer)
                p, least = above_chance(weight, evenly, count, threshold=SIDE, times=TIMES)
                p = np.maximum(p, share_p(even, count, threshold=EVEN))
                share = columns[f"{side}_weight"].estimates[site_layer].value
                threshold = np.where(share >= least, EVEN, np.inf)  # on the side that has the weight
                chance = (evenly.sum(dim=0) / count.sum(dim=0)).numpy()
                rate = Rate("of its weight", value=share, baseline=chance)
                label, measure = f"averages:{side}", f"{side}_evenness"
                tests.add(site_layer, measure, label, evenness, p, threshold=threshold, counts=count, rate=rate)
        tests.conclude(report)
        return report

    def signature(self) -> dict[str, str]:
        return evidence_signature(self.options)


def _keys(heads: HeadBatch, side: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The counted keys of a side as numbers [b t s], and of its queries: ln of their number, several, share of all."""
    everywhere = (heads.visible & heads.keys[:, None]).to(heads.context.dtype)
    first = heads.first_query
    keys = everywhere.triu(first + 1) if side == "after" else everywhere.tril(first - 1)
    count = keys.sum(dim=-1)  # [b t]
    share = count / heads.visible.sum(dim=-1).clamp(min=1)
    return keys, count.clamp(min=2).log()[:, None], count >= SEVERAL, share[:, None]
