"""Syntactic heads: how often a head points from a word to its head or dependent (Voita et al. 2019, §5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio, interval
from headscope.config import option
from headscope.data.alignment import Aligned
from headscope.data.corpus import Corpus
from headscope.engine.base import (
    Aggregates,
    Analysis,
    AnalysisReport,
    Column,
    HeadBatch,
    RunOptions,
    analysis,
    head_ids,
    max_and_position,
)
from headscope.engine.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.heads import HeadId, Site

RELATIONS = ("nsubj", "obj", "amod", "advmod")
MARGIN = 0.10
REACH = 64  # offsets of the baseline beyond ±REACH words are counted together

DIRECTIONS = {">": "head-to-dependent", "<": "dependent-to-head"}


@dataclass(frozen=True)
class SyntacticOptions:
    """Options of `syntactic`: relations are those of UD 2, without subtypes."""

    relations: str = option(
        "default", "UD relations: a list, all, or default (nsubj,obj,amod,advmod).", metavar="NAMES"
    )
    min_instances: int = option(30, "With --relations all: leave rarer ones out.", minimum=1)


@analysis
class Syntactic(Analysis):
    """Accuracy of each head for each relation and direction, against the best fixed offset.

    Word-level weights: summed over the key word's subwords, averaged over the query word's subwords (Clark et
    al. 2019, §4.1); special tokens are no words. Accuracy: share of the relation's instances in which the
    largest word-level weight at one word lies on the other. Baseline: accuracy of always choosing the
    relation's most frequent word offset (the smallest one where several tie; intervals keep it fixed).
    `syntactic_relation` is the one of the largest margin, the first in the order asked for where several tie.
    A head is syntactic where it beats the baseline by at least 10 points (Voita et al. 2019, §5.2).
    `nsubj>` is read from head to dependent, `nsubj<` from dependent to head. UD 2 calls Voita's dobj `obj`.
    """

    name = "syntactic"
    order = 50
    summary = "accuracy on dependency relations, against the best fixed offset"
    measures = (Measure("syntactic_margin", "syntactic margin over baseline"),)
    functions = (
        HeadFunction(
            "syntactic", "▲", "→", "#e69f00", "syntactic: looks along the relation", order=2, detail="relation"
        ),
    )
    figures = (
        AnalysisFigure(
            "syntactic",
            "Accuracy of every head on syntactic relations, beside the baseline.",
            "headscope.report.figures.relations:relation_accuracy",
            file="relations",
        ),
    )
    needs = frozenset({"parse"})
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})
    Options = SyntacticOptions

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.names: list[str] = list(RELATIONS)
        if self.options.relations not in ("default", "all"):
            self.names = [name.strip() for name in self.options.relations.split(",") if name.strip()]

    def read(self, corpus: Corpus) -> None:
        """With `relations` "all": the names of those that occur, sorted."""
        if self.options.relations == "all":
            parses = (sentence.parse for sentence in corpus if sentence.parse)
            self.names = sorted({relation.relation for parse in parses for relation in parse.relations})

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        if heads.key_side is not heads.batch.source or not heads.batch.aligned:
            return {}
        if "syntactic plan" not in heads.cache:
            heads.cache["syntactic plan"] = _Plan(heads, self.names)
        plan: _Plan = heads.cache["syntactic plan"]
        hits = plan.hits(heads.weights)  # [n h]
        b, h = heads.weights.shape[:2]
        cells = torch.zeros(b, len(self.names) * 2, h, device=hits.device)
        cells.view(-1, h).index_add_(0, plan.cell, hits)
        ratios = {"accuracy": Ratio(cells.transpose(1, 2), plan.instances[:, None])}
        if not plan.counted:  # the same for every layer: kept once, at the first
            plan.counted = True
            ratios["offsets"] = Ratio(plan.offsets, plan.instances[:, :, None])
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        best: dict[HeadId, tuple[float, float, float, str]] = {}
        tables = []
        for site_layer in aggregates.site_layers("accuracy"):
            table = self._site_layer_table(aggregates, site_layer)
            tables.append(table)
            row: Any
            for row in table.itertuples():
                head = HeadId(*site_layer, row.head)
                if row.margin == row.margin and row.margin > best.get(head, (-2.0,))[0]:
                    best[head] = (row.margin, row.margin_low, row.margin_high, row.label)
            for row in table[table.margin >= MARGIN].sort_values("margin", ascending=False, kind="stable").itertuples():
                report.label(HeadId(*site_layer, row.head), f"syntactic:{row.label}")
        if tables:
            if self.options.relations != "all":
                report.remarks = _not_found(self.names, tables)
            report.tables["syntactic"] = pd.concat(tables, ignore_index=True)
            report.columns = [_margin_column(aggregates.site_layers("accuracy"), aggregates, best)]
            report.texts = {"syntactic_relation": {head: row[3] for head, row in best.items()}}
        return report

    def _site_layer_table(self, aggregates: Aggregates, site_layer: tuple[Site, int]) -> pd.DataFrame:
        """One row per head, relation and direction that has instances enough, for one site and layer."""
        hits, count = aggregates.bootstrap.sums(aggregates.group_sums("accuracy", site_layer))  # [1+r h c], [1+r 1 c]
        first = next(pair for pair in aggregates.site_layers("offsets") if pair[0] is site_layer[0])
        offsets, _ = aggregates.bootstrap.sums(aggregates.group_sums("offsets", first))  # [1+r c o]
        accuracy = hits / count
        modal = offsets[0].argmax(dim=-1)  # [c]
        modal_counts = offsets.gather(-1, modal[None, :, None].expand(len(offsets), -1, 1))[..., 0]  # [1+r c]
        base = (modal_counts / count[:, 0])[:, None]  # [1+r 1 c]
        estimates = {
            "accuracy": interval(accuracy),
            "baseline": interval(base.expand_as(accuracy)),
            "margin": interval(accuracy - base),
        }
        enough = self.options.min_instances if self.options.relations == "all" else 1
        rows = []
        for cell in range(count.shape[-1]):
            if count[0, 0, cell] >= enough:
                rows.append(self._rows(site_layer, cell, int(count[0, 0, cell]), int(modal[cell]) - REACH, estimates))
        return pd.concat(rows, ignore_index=True) if rows else _no_rows(site_layer, estimates)

    def _rows(
        self, site_layer: tuple[Site, int], cell: int, count: int, offset: int, estimates: Mapping[str, Estimate]
    ) -> pd.DataFrame:
        sign = "><"[cell % 2]
        relation = self.names[cell // 2]
        columns: dict[str, Any] = {
            "site": site_layer[0].value,
            "layer": site_layer[1],
            "head": np.arange(estimates["accuracy"].value.shape[0]),
            "relation": relation,
            "direction": DIRECTIONS[sign],
            "label": relation + sign,
            "count": count,
            "baseline_offset": offset,
        }
        for name, estimate in estimates.items():
            columns[name] = estimate.value[:, cell]
            columns[f"{name}_low"] = estimate.low[:, cell]
            columns[f"{name}_high"] = estimate.high[:, cell]
        return pd.DataFrame(columns)

    def signature(self) -> dict[str, str]:
        enough = f"(min={self.options.min_instances})" if self.options.relations == "all" else ""
        rel = self.options.relations + enough
        return {"parse": self.run.parse, "rel": rel, "word": "sum-keys,mean-queries"}


def _not_found(names: Sequence[str], tables: Sequence[pd.DataFrame]) -> list[str]:
    present = {name for table in tables for name in table.relation}
    missing = [name for name in dict.fromkeys(names) if name not in present]
    if not missing:
        return []
    return [f"syntactic: the parses have no {', '.join(missing)} (relations are those of UD 2, without subtypes)"]


def _no_rows(site_layer: tuple[Site, int], estimates: Mapping[str, Estimate]) -> pd.DataFrame:
    numbers = [f"{name}{end}" for name in estimates for end in ("", "_low", "_high")]
    texts = ["site", "layer", "head", "relation", "direction", "label", "count", "baseline_offset"]
    return pd.DataFrame(columns=[*texts, *numbers])


def _margin_column(
    site_layers: Sequence[tuple[Site, int]],
    aggregates: Aggregates,
    best: Mapping[HeadId, tuple[float, float, float, str]],
) -> Column:
    """The best margin of each head with its interval."""
    estimates = {}
    for site_layer in site_layers:
        count = aggregates.group_sums("accuracy", site_layer).total.shape[1]
        rows = [best.get(head, (np.nan, np.nan, np.nan, ""))[:3] for head in head_ids(site_layer, count)]
        value, low, high = np.array(rows, dtype=float).reshape(-1, 3).T
        estimates[site_layer] = Estimate(value, low, high)
    return Column("syntactic_margin", estimates)


class _Plan:
    """Index tensors of one batch: which subwords make which word, and which words are related.

    Words of the batch are laid out [b w], w up to the longest sentence; `n` counts relation instances in
    both directions. Built once a batch and used for every layer.
    """

    def __init__(self, heads: HeadBatch, names: Sequence[str]) -> None:
        self.counted = False
        device = heads.weights.device
        aligned = heads.batch.aligned
        b, s = heads.key_side.ids.shape
        words = max([1, *(len(a.units) for a in aligned if a)])
        member = np.zeros((b, words, s), dtype=np.float32)
        aligned_instances = [_instances(row, a, names) for row, a in enumerate(aligned) if a is not None]
        instances = np.concatenate([*aligned_instances, np.empty((0, 4), dtype=np.int64)])  # [n 4]: row, cell, from, to
        for line, a in enumerate(aligned):
            for word, subwords in enumerate(a.units if a else ()):
                member[line, word, subwords] = 1.0
        self.member = torch.from_numpy(member).to(device)  # [b w s]
        self.mean = self.member / self.member.sum(-1, keepdim=True).clamp(min=1)
        row, cell, start, end = (torch.from_numpy(column).to(device) for column in instances.T)
        self.row, self.start, self.end = row, start, end
        cells = 2 * len(names)
        self.cell = row * cells + cell
        self.is_word = self.member.any(dim=-1)  # [b w]
        self.instances = torch.bincount(self.cell, minlength=b * cells).view(b, cells).float()
        reach = 2 * REACH + 1
        offset = (end - start).clamp(-REACH, REACH) + REACH
        self.offsets = torch.bincount(self.cell * reach + offset, minlength=b * cells * reach)
        self.offsets = self.offsets.view(b, cells, reach).float()

    def hits(self, weights: Tensor) -> Tensor:
        """Whether the largest word-level weight of each instance's word lies on its partner: [n h]."""
        to_words = torch.einsum("bhts,bws->bhtw", weights, self.member.to(weights.dtype))
        words = torch.einsum("bhtv,bwt->bhwv", to_words, self.mean.to(weights.dtype))  # [b h w v]
        words = words.masked_fill(~self.is_word[:, None, None, :], -1.0)
        _, argmax_position = max_and_position(words)  # [b h w]
        return (argmax_position[self.row, :, self.start] == self.end[:, None]).float()


def _instances(row: int, aligned: Aligned, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Both directions of every wanted relation: [n 4] with columns row, cell, from, to."""
    columns = {name: 2 * index for index, name in enumerate(names)}
    relations = [(columns[name], head, dependent) for name, head, dependent in aligned.relations if name in columns]
    rows = [(row, cell, head, dependent) for cell, head, dependent in relations]
    rows += [(row, cell + 1, dependent, head) for cell, head, dependent in relations]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
