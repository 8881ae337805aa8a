"""Heads of decoders that copy: previous-token, duplicate-token and induction scores (Olsson et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.engine.declarations import HeadFunction, Measure
from headscope.engine.evidence.labels import LabelTests, evidence_signature
from headscope.engine.evidence.significance import share_p
from headscope.heads import Site

THRESHOLD = 0.5


class _Pattern(Analysis):
    """Mean over queries of the weight on the keys that a pattern names, on text and on repeated tokens.

    The column without a suffix is measured on the corpus, `…_random` on random tokens that are repeated
    once (Olsson et al. 2022, §"Induction heads"). Only queries for which the pattern names a key count. A
    head is labelled if the score on random tokens, where content cannot help, is at least 0.5, on the evidence of
    `headscope.engine.evidence.labels`: one test a head.
    """

    version = 2
    order = 70
    reads = "statistics"
    joins_layers = True
    Options = LabelOptions
    sites = frozenset({Site.DECODER_SELF})
    passes = frozenset({"text", "random"})
    sampled = True

    def keys(self, heads: HeadBatch, queries: slice) -> Tensor:
        """The keys [b q s] that the pattern names for the queries from a position to another."""
        raise NotImplementedError

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        score, named = heads.weight_on_pairs(self.name, partial(self.keys, heads))
        suffix = "_random" if heads.batch.kind == "random" else ""
        return {f"{self.name}{suffix}": heads.over_queries(score, only=named)}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        tests, label = LabelTests(self.options.min_instances), self.name.removesuffix("_token")
        for column in report.columns:
            if column.name.endswith("_random"):
                for site_layer, score in column.estimates.items():
                    total, count = aggregates.by_sentence(column.name, site_layer)
                    p = share_p(total, count, threshold=THRESHOLD)
                    tests.add(site_layer, column.name, label, score, p, threshold=THRESHOLD, counts=count)
        tests.conclude(report)
        return report

    def signature(self) -> dict[str, str]:
        return evidence_signature(self.options)


def same_token(heads: HeadBatch, queries: slice) -> Tensor:
    """Whether key and query are the same token [b q s], the key being earlier."""
    ids = heads.query_side.ids
    return (ids[:, queries, None] == ids[:, None, :]).tril(queries.start - 1)


@analysis
class PreviousToken(_Pattern):
    """Mean weight on the position just before the query."""

    name = "previous_token"
    summary = "mean weight on the previous token, on the corpus and on repeated random tokens"
    measures = (Measure("previous_token", range=(0, 1)), Measure("previous_token_random", range=(0, 1)))
    functions = (HeadFunction("previous", "◀", "p", "#0072b2", "previous token", order=4),)

    def keys(self, heads: HeadBatch, queries: slice) -> Tensor:
        b, s = heads.query_side.ids.shape
        positions = torch.arange(s, device=heads.queries.device)
        return (positions == positions[queries, None] - 1).expand(b, -1, -1)


@analysis
class DuplicateToken(_Pattern):
    """Mean weight on all earlier occurrences of the query's token."""

    name = "duplicate_token"
    summary = "mean weight on earlier occurrences of the same token"
    measures = (Measure("duplicate_token", range=(0, 1)), Measure("duplicate_token_random", range=(0, 1)))
    functions = (HeadFunction("duplicate", "■", "d", "#f0e442", "duplicate token", order=5),)

    def keys(self, heads: HeadBatch, queries: slice) -> Tensor:
        return same_token(heads, queries)


@analysis
class Induction(_Pattern):
    """Mean weight on the tokens that followed earlier occurrences of the query's token."""

    name = "induction"
    summary = "mean weight on the token after an earlier occurrence of the same token"
    measures = (Measure("induction", range=(0, 1)), Measure("induction_random", range=(0, 1)))
    functions = (HeadFunction("induction", "●", "i", "#d55e00", "induction", order=6),)

    def keys(self, heads: HeadBatch, queries: slice) -> Tensor:
        followed = same_token(heads, queries)  # [b q s]
        moved = followed.roll(1, dims=-1)
        moved[..., 0] = False
        return moved.tril(queries.start - 1)
