"""Heads that average: even weight over what follows a query, or over what precedes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.description.examples import SEVERAL
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.engine.evidence.labels import LabelTests, Rate
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
        sides = heads.shared("sides", lambda: _Sides.of(heads))
        weight, logs = (torch.einsum("bhts,bnts->bnht", of, sides.keys) for of in (heads.weights, heads.log_weights))
        weight = weight.clamp(min=torch.finfo(weight.dtype).tiny)
        evenness = (weight.log() - logs / weight).div(sides.largest).clamp(0, 1)  # entropy of w / Σ w
        sums = torch.cat([evenness, weight], dim=2) @ sides.queries  # [b n 2h 1]
        values = torch.cat([sums[..., 0], sides.chance.expand(*evenness.shape[:3])], dim=2)  # [b n 3h]
        return {
            f"{side}_{name}": Ratio(value, sides.instances[:, number])
            for number, side in enumerate(SIDES)
            for name, value in zip(("evenness", "weight", "chance"), values[:, number].chunk(3, dim=-1), strict=True)
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        tests, columns = LabelTests.of(self.options), report.columns
        for side in SIDES:
            for site_layer, evenness in columns[f"{side}_evenness"].items():
                even, count = aggregates.by_sentence(f"{side}_evenness", site_layer)
                weight, _ = aggregates.by_sentence(f"{side}_weight", site_layer)
                evenly, _ = aggregates.by_sentence(f"{side}_chance", site_layer)
                p, least = above_chance(weight, evenly, count, threshold=SIDE, times=TIMES)
                p = np.maximum(p, share_p(even, count, threshold=EVEN))
                share = columns[f"{side}_weight"][site_layer].value
                threshold = np.where(share >= least, EVEN, np.inf)  # on the side that has the weight
                chance = (evenly.sum(dim=0) / count.sum(dim=0)).numpy()
                rate = Rate("of its weight", value=share, baseline=chance)
                label, measure = f"averages:{side}", f"{side}_evenness"
                tests.add(site_layer, measure, label, evenness, p, threshold=threshold, counts=count, rate=rate)
        tests.conclude(report)
        return report


class _Sides(NamedTuple):
    """Of both sides n: counted keys [b n t s], ln of their number [b n 1 t], and queries with several [b n t 1].

    The number of these queries is `instances` [b n 1], the sum of their shares of visible keys `chance` [b n 1].
    """

    keys: Tensor
    largest: Tensor
    queries: Tensor
    instances: Tensor
    chance: Tensor

    @classmethod
    def of(cls, heads: HeadBatch) -> _Sides:
        dtype, first = heads.context.dtype, heads.first_query
        everywhere = (heads.visible & heads.keys[:, None]).to(dtype)
        keys = torch.stack([everywhere.triu(first + 1), everywhere.tril(first - 1)], dim=1)
        number = keys.sum(dim=-1)  # [b n t]
        queries = (heads.queries[:, None] & (number >= SEVERAL)).to(dtype)
        share = number / heads.visible.sum(dim=-1).clamp(min=1)[:, None]
        largest = number.clamp(min=2).log()[:, :, None]
        instances, chance = (of.sum(dim=-1, keepdim=True) for of in (queries, queries * share))
        return cls(keys, largest, queries[..., None], instances, chance)
