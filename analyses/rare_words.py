"""Heads that point at the rarest tokens of a sentence (Voita et al. 2019, §5.3)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import PublishedLabelOptions
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.engine.declarations import HeadFunction, Measure
from headscope.engine.evidence.labels import LabelTests, evidence_signature, is_published
from headscope.engine.evidence.significance import above_chance

FREQUENT = 500
SHARE, TIMES_CHANCE = 0.5, 2.0


@analysis
class RareWords(Analysis):
    """Share of queries whose largest weight is on the rarest token, and on one of the two rarest.

    Only sentences count whose rarest token is not among the 500 most frequent (Voita et al. 2019, §5.3).
    Tokens are the model's subwords, special ones left out as queries and as keys. Frequency ranks follow
    (count, descending; then the subword, ascending), so every subword has its own rank; all occurrences of the
    rarest subword are hits. `…_chance` is the mean share of the keys a query sees that are hits.

    A head is labelled `rare` if at least half of the queries pick one of the two rarest, and twice as many as by chance
    (the paper reports 50 % and more, and sets no threshold), on the evidence of `headscope.engine.evidence.labels`: one
    test a head, whose p is the larger of both. With `--label-rule published` half of the queries are enough.
    """

    name = "rare_words"
    reads = "statistics"
    version = 2
    order = 60
    summary = "share of queries whose largest weight is on the rarest token"
    measures = (
        Measure("rarest", "argmax on the rarest token", range=(0, 1)),
        Measure("rarest_two", "argmax on the two rarest", range=(0, 1)),
        Measure("rarest_chance", range=(0, 1)),
        Measure("rarest_two_chance", range=(0, 1)),
    )
    functions = (HeadFunction("rare", "★", "r", "#009e73", "rare: looks at the rarest token", order=3),)
    needs = frozenset({"frequencies"})
    Options = PublishedLabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        if heads.key_side is not heads.batch.source or self.run.ranks is None:
            return {}
        ranks = self.run.ranks
        rarest = heads.once("rarest", lambda: _rarest(heads, ranks))  # [2 b s]
        counted = heads.once("rare sentences", lambda: _outside_frequent(heads, ranks))  # [b]
        only = counted[:, None].expand_as(heads.queries)
        ratios: dict[str, Ratio] = {}
        for name, hits in zip(("rarest", "rarest_two"), rarest, strict=True):
            on_hit = (
                hits[:, None].expand(*heads.argmax_position.shape[:2], -1).gather(-1, heads.argmax_position)
            )  # [b h t]
            ratios[name] = heads.over_queries(on_hit.to(torch.float32), only=only)
            chance = heads.shared(f"{name} chance", lambda hits=hits: _chance(heads, hits, only))  # type: ignore[misc]
            ratios[f"{name}_chance"] = Ratio(chance[:, None].expand_as(ratios[name].total), ratios[name].count)
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        columns = {column.name: column.estimates for column in report.columns}
        published = is_published(self.options)
        tests = LabelTests(self.options.min_instances, published=published)
        for site_layer, share in columns.get("rarest_two", {}).items():
            hits, count = aggregates.by_sentence("rarest_two", site_layer)  # [g h], [g 1]
            by_chance, _ = aggregates.by_sentence("rarest_two_chance", site_layer)
            p, threshold = above_chance(hits, by_chance, count, threshold=SHARE, times=TIMES_CHANCE)
            chance = columns["rarest_two_chance"][site_layer].value
            least = SHARE if published else threshold
            tests.add(site_layer, "rarest_two", "rare", share, p, threshold=least, counts=count, baseline=chance)
        tests.conclude(report)
        if columns and not any((e.value == e.value).any() for e in columns["rarest"].values()):
            report.remarks.append(f"rare_words: no sentence has a token outside the {FREQUENT} most frequent")
        return report

    def signature(self) -> dict[str, str]:
        return {"freq": self.run.frequencies, **evidence_signature(self.options)}


def _ranks(heads: HeadBatch, ranks: Tensor) -> Tensor:
    """Frequency rank of every counted key, 1 is the most frequent; 0 for the others [b s]."""
    return ranks.to(heads.keys.device)[heads.key_side.ids] * heads.keys


def _rarest(heads: HeadBatch, ranks: Tensor) -> Tensor:
    """Which keys are the sentence's rarest subword, and which are one of its two rarest [2 b s]."""
    key_ranks = _ranks(heads, ranks)
    first = key_ranks.amax(dim=-1, keepdim=True)
    second = (key_ranks * (key_ranks < first)).amax(dim=-1, keepdim=True)
    return torch.stack([key_ranks == first, key_ranks >= second.clamp(min=1)]) & heads.keys


def _outside_frequent(heads: HeadBatch, ranks: Tensor) -> Tensor:
    return _ranks(heads, ranks).amax(dim=-1) > FREQUENT


def _chance(heads: HeadBatch, hits: Tensor, only: Tensor) -> Tensor:
    """Summed over the counted queries of `only` [b t]: the share of the counted keys each sees that are hits [b]."""
    columns = torch.stack([heads.keys & hits, heads.keys], dim=-1).to(heads.context.dtype)  # [b s 2]
    visible_hits, visible = heads.visible_on(columns).unbind(dim=-1)  # [b t]
    share = visible_hits / visible.clamp(min=1)
    return (share * (heads.queries & only)).sum(dim=-1)
