"""Heads of decoders that copy: previous-token, duplicate-token and induction scores (Olsson et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config import LabelOptions
from headscope.config.declarations import HeadFunction, Measure
from headscope.engine.base import Analysis, HeadBatch, LabelRule, Rate, analysis
from headscope.heads import Site

RATE = Rate("of its weight, on average, on repeated random tokens")


class _Pattern(Analysis):
    """Mean over queries of the weight on the keys of a pattern, on text and on repeated random tokens.

    The column without a suffix is measured on the corpus, `…_random` on random tokens that are repeated once (Olsson et
    al. 2022, §"Induction heads"). Only queries with a key of the pattern count. Label: a score of at least 0.5 on
    random tokens, where content cannot help, with one test a head (`headscope.engine.evidence.report`).
    """

    version = 2
    order = 70
    reads = "rows"
    Options = LabelOptions
    sites = frozenset({Site.DECODER_SELF})
    passes = frozenset({"text", "random"})
    sampled = True

    def marks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Marks of queries and of keys [b t], for tokens [b t]: a query's keys are the earlier ones with its mark."""
        raise NotImplementedError

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        of_queries, of_keys = heads.cached_per_batch(self.name, lambda: self.marks(heads.query_side.ids.int()))
        score, has_pairs = heads.weight_on_pairs(
            self.name, lambda keys: of_queries[:, heads.span, None] == of_keys[:, None, keys], earlier=True
        )
        suffix = "_random" if heads.batch.kind == "random" else ""
        return {f"{self.name}{suffix}": heads.over_queries(score, only=has_pairs)}


@analysis
class PreviousToken(_Pattern):
    """Mean weight on the position just before the query."""

    name = "previous_token"
    rules = (LabelRule("previous", "previous_token_random", 0.5, rate=RATE),)
    summary = "mean weight on the previous token, on the corpus and on repeated random tokens"
    measures = (
        Measure("previous_token", "previous-token weight", range=(0, 1)),
        Measure("previous_token_random", "previous-token weight, random tokens", range=(0, 1)),
    )
    functions = (HeadFunction("previous", "◀", "p", "#0072b2", "previous: looks at the token before", order=4),)

    def marks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(ids.shape[1], dtype=torch.int32, device=ids.device).expand_as(ids)
        return positions, positions + 1


@analysis
class DuplicateToken(_Pattern):
    """Mean weight on all earlier occurrences of the query's token."""

    name = "duplicate_token"
    rules = (LabelRule("duplicate", "duplicate_token_random", 0.5, rate=RATE),)
    summary = "mean weight on earlier occurrences of the same token"
    measures = (
        Measure("duplicate_token", "duplicate-token weight", range=(0, 1)),
        Measure("duplicate_token_random", "duplicate-token weight, random tokens", range=(0, 1)),
    )
    functions = (
        HeadFunction("duplicate", "■", "d", "#f0e442", "duplicate: looks at the same token, earlier", order=5),
    )

    def marks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, ids


@analysis
class Induction(_Pattern):
    """Mean weight on the tokens that followed earlier occurrences of the query's token."""

    name = "induction"
    rules = (LabelRule("induction", "induction_random", 0.5, rate=RATE),)
    summary = "mean weight on the token after an earlier occurrence of the same token"
    measures = (
        Measure("induction", "induction weight", range=(0, 1)),
        Measure("induction_random", "induction weight, random tokens", range=(0, 1)),
    )
    functions = (
        HeadFunction("induction", "●", "i", "#d55e00", "induction: looks at what followed the same token", order=6),
    )

    def marks(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, torch.nn.functional.pad(ids[:, :-1], (1, 0), value=-1)
