"""Heads that point at the rarest tokens of a sentence (Voita et al. 2019, §5.3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import PublishedLabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.distributed import upload
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, LabelRule, Rate, analysis

FREQUENT = 500
NAMES = ("rarest", "rarest_two")


@analysis
class RareWords(Analysis):
    """Share of queries whose largest weight is on the rarest token, and on one of the two rarest.

    Sentences count whose rarest token is not among the 500 most frequent (Voita et al. 2019, §5.3). Tokens are subwords
    without special ones, ranked by (count, subword); all occurrences of a rarest one are hits. `…_chance` is the share
    of visible keys that are hits.

    Label `rare`: one of the two rarest for half of the queries, and twice chance; `label-rule=published`: half is
    enough.
    """

    name = "rare_words"
    reads = "rows"
    version = 3
    order = 60
    summary = "share of queries whose largest weight is on the rarest token"
    measures = (
        Measure("rarest", "argmax on the rarest token", range=(0, 1)),
        Measure("rarest_two", "argmax on the two rarest", range=(0, 1)),
        Measure("rarest_chance", "rarest token by chance", range=(0, 1)),
        Measure("rarest_two_chance", "two rarest by chance", range=(0, 1)),
    )
    functions = (HeadFunction("rare", "★", "r", "#009e73", "rare: looks at one of the two rarest tokens", order=3),)
    needs = frozenset({"frequencies"})
    Options = PublishedLabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        corpus_ranks = self.run.ranks
        if heads.key_side is not heads.batch.source or corpus_ranks is None:
            return {}
        ranks = heads.cached_per_batch("ranks", lambda: upload(corpus_ranks, heads.keys.device))
        rarest, only = heads.cached_per_batch("rarest", lambda: _rarest(heads, ranks))  # [b 2 s], [b 1]
        even = heads.shared(
            "rarest chance",  # [b 2]
            lambda: heads.over_queries(heads.evenly_on(rarest.mT.to(heads.context.dtype), heads.keys), only=only),
        )
        positions = heads.maximum.position
        b, h, t = positions.shape
        hits = rarest[:, :, None].expand(b, 2, h, -1).gather(-1, positions[:, None].expand(b, 2, h, t))  # [b 2 h t]
        sums = heads.over_queries(hits.flatten(1, 2), only=only)
        ratios: dict[str, Ratio] = {}
        for name, total, chance in zip(NAMES, sums.total.tensor_split(2, dim=1), even.total.unbind(dim=1), strict=True):
            ratios[name] = Ratio(total, sums.count)
            ratios[f"{name}_chance"] = Ratio(chance[:, None].expand(b, h), sums.count)
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        rate = Rate(self.run.of_largest_weights)
        self.rules = [LabelRule("rare", "rarest_two", 0.5, chance="rarest_two_chance", rate=rate)]
        report = super().report(aggregates)
        if report.columns and all(np.isnan(estimate.value).all() for estimate in report.columns["rarest"].values()):
            report.remarks.append(f"rare_words: no sentence has a token outside the {FREQUENT} most frequent")
        return report

    def signature(self) -> dict[str, str]:
        return {"freq": self.run.frequencies, **super().signature()}


def _rarest(heads: HeadBatch, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Masks [b 2 s], as numbers, of keys that are the sentence's rarest subword, and one of its two rarest.

    And a mask [b 1] of sentences whose rarest subword is not among the most frequent ones. Rank 1 is the most frequent.
    """
    key_ranks = ranks[heads.key_side.ids] * heads.keys  # [b s], 0 where no key counts
    first = key_ranks.amax(dim=-1, keepdim=True)
    second = (key_ranks * (key_ranks < first)).amax(dim=-1, keepdim=True)
    rarest = torch.stack([key_ranks == first, key_ranks >= second.clamp(min=1)], dim=1) & heads.keys[:, None]
    return rarest.to(torch.float32), first > FREQUENT
