"""Syntactic heads: how often a head points from a word to its head or dependent (Voita et al. 2019, §5.2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Array, Estimate, Ratio, interval, units_of
from headscope.config import PublishedLabelOptions, option
from headscope.config.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.data.corpus import Corpus
from headscope.data.parses import Aligned
from headscope.distributed import upload
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelTests, Rate, evidence_signature, head_ids
from headscope.engine.evidence.significance import p_values
from headscope.engine.heads.head_batch import max_and_position
from headscope.errors import ConfigError, flag
from headscope.heads import HeadId, Site, SiteLayer
from headscope.registry import unknown

RELATIONS = ("nsubj", "obj", "amod", "advmod")
MARGIN = 0.10  # least accuracy above the baseline of a labelled head
REACH = 64  # offsets beyond ±REACH words are counted together

DIRECTIONS = {">": "head-to-dependent", "<": "dependent-to-head"}


@dataclass(frozen=True)
class SyntacticOptions(PublishedLabelOptions):
    """Options of `syntactic`: relations are those of UD 2, without subtypes."""

    relations: str = option(
        "default", "UD relations: a list, all, or default (nsubj,obj,amod,advmod).", metavar="NAMES"
    )


@analysis
class Syntactic(Analysis):
    """Accuracy of each head for each dependency relation and direction, against the best fixed offset.

    Word-level weights: summed over the key word's subwords, averaged over the query word's (Clark et al. 2019, §4.1).
    Accuracy: share of instances in which one word's largest weight lies on the other. Baseline: always the relation's
    most frequent word offset. `syntactic_relation` has the largest margin among relations with `min-instances`.
    `nsubj>` is read from head to dependent; UD 2's `obj` is Voita's dobj.

    Label `syntactic:RELATION`: 10 points above the baseline (Voita et al. 2019, §5.2); `label-rule=published` skips
    the test.
    """

    name = "syntactic"
    reads = "rows"
    version = 3
    order = 50
    summary = "accuracy on dependency relations, against the best fixed offset"
    measures = (Measure("syntactic_margin", "syntactic margin over baseline", range=(-0.5, 0.5), signed=True),)
    functions = (
        HeadFunction(
            "syntactic", "▲", "→", "#e69f00", "syntactic: looks along the relation", order=2, detail="relation"
        ),
    )
    figures = (
        AnalysisFigure(
            "syntactic",
            "Accuracy of every head on syntactic relations, beside the baseline.",
            "headscope.report.figures.layers:draw_relations",
            file="relations",
        ),
    )
    needs = frozenset({"parse"})
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})
    Options = SyntacticOptions
    merges = ("has_unaligned",)

    names: Sequence[str] = RELATIONS
    has_unaligned = False

    def sample(self, corpus: Corpus) -> Corpus | str:
        alone = self.run.token_filter.queries != "all"
        return f"is of all words; leave out {flag.queries}, which counts one position" if alone else corpus

    def read(self, corpus: Corpus) -> None:
        """With `relations` "all": the names of those that occur, sorted. ConfigError where none of a list occurs."""
        if self.options.relations == "default":
            return
        self.names = [name.strip() for name in self.options.relations.split(",") if name.strip()]
        parses = (parse for sentence in corpus for parse in (sentence.parse, sentence.target_parse) if parse)
        relation_names = sorted({relation.relation for parse in parses for relation in parse.relations})
        if self.options.relations == "all":
            self.names = relation_names
        elif not set(relation_names) & set(self.names):
            problem = unknown("relation in these parses", ", ".join(self.names), relation_names)
            raise ConfigError(f"{flag.relations}: {problem}")

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        if not heads.key_side.aligned:
            return {}
        self.has_unaligned |= None in heads.key_side.aligned
        name, exclude_sinks = f"{heads.site}/syntactic plan", self.run.token_filter.exclude_sinks
        plan = heads.of_batch.get(name, heads.batch, lambda: _Plan(heads, self.names, exclude_sinks=exclude_sinks))
        block = plan.block(heads)
        hits = plan.hits(heads, block)  # [n h]
        b, h = heads.context.shape[:2]
        cells = torch.zeros(b, len(self.names) * 2, h, device=hits.device)
        cells.view(-1, h).index_add_(0, block.due[3], hits)
        ratios = {"accuracy": Ratio(cells.transpose(1, 2), block.instances[:, None])}
        if not plan.is_counted:  # the same for every layer: kept once, at the first
            plan.is_counted = True
            ratios["offsets"] = Ratio(plan.offsets, plan.instances[:, :, None])
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests = AnalysisReport(), LabelTests.of(self.options)
        all_margins = [self._margins(aggregates, site_layer) for site_layer in aggregates.site_layers("accuracy")]
        for margins in all_margins:
            margins.test(tests)
        adjusted_p = tests.conclude(report)
        if all_margins:
            fewest = self.options.min_instances if self.options.relations == "all" else 1
            tables = [margins.table(p, fewest=fewest) for margins, p in zip(all_margins, adjusted_p, strict=True)]
            if self.options.relations != "all":
                report.remarks = _not_found(self.names, tables, has_unaligned=self.has_unaligned)
            report.tables["syntactic"] = pd.concat(tables, ignore_index=True)
            best = {margins.site_layer: margins.best(self.options.min_instances) for margins in all_margins}
            report.columns["syntactic_margin"] = {site_layer: margin[0] for site_layer, margin in best.items()}
            texts = {head: text for _, of_heads in best.values() for head, text in of_heads.items()}
            report.texts = {"syntactic_relation": texts}
        return report

    def _margins(self, aggregates: Aggregates, site_layer: SiteLayer) -> _Margins:
        """Accuracies of one site and layer, beside the baselines, which are kept once for all layers of the site."""
        hits, count = aggregates.bootstrap.sums(aggregates.sums[("accuracy", *site_layer)])  # [1+r h c], [1+r 1 c]
        first = next(pair for pair in aggregates.site_layers("offsets") if pair[0] is site_layer[0])
        offsets, _ = aggregates.bootstrap.sums(aggregates.sums[("offsets", *first)])  # [1+r c o]
        modal = offsets[0].argmax(dim=-1)  # [c]
        modal_counts = offsets.gather(-1, modal[None, :, None].expand(len(offsets), -1, 1))[..., 0]  # [1+r c]
        accuracy, baseline = hits / count, (modal_counts / count[:, 0])[:, None]
        by_sentence, instances = aggregates.by_sentence("accuracy", site_layer)  # [g h c], [g 1 c]
        units = units_of(instances)
        of_offsets, _ = aggregates.by_sentence("offsets", first)  # [g c o]
        of_modal = of_offsets.gather(-1, modal[None, :, None].expand(len(of_offsets), -1, 1))[..., 0]
        return _Margins(
            site_layer,
            [name + sign for name in self.names for sign in DIRECTIONS],
            modal.numpy() - REACH,
            interval(accuracy, units=units),
            interval(baseline.expand_as(accuracy), units=units),
            interval(accuracy - baseline, units=units),
            (by_sentence, of_modal[:, None]),
            instances,
        )

    def signature(self) -> dict[str, str]:
        minimum_note = f"(min={self.options.min_instances})" if self.options.relations == "all" else ""
        rel = self.options.relations + minimum_note
        word = {"parse": self.run.parse, "rel": rel, "word": "sum-keys,mean-queries"}
        return word | evidence_signature(self.options)


@dataclass(frozen=True)
class _Margins:
    """Accuracies [h c] of one (site, layer) for each relation and direction c, against the best fixed offset.

    `offsets` [c] are the best offsets. `hits` are counts by sentence, of the heads [g h c] and of the baseline [g 1 c],
    among `instances` [g 1 c].
    """

    site_layer: SiteLayer
    labels: list[str]
    offsets: Array
    accuracy: Estimate
    baseline: Estimate
    margin: Estimate
    hits: tuple[Tensor, Tensor]
    instances: Tensor

    def test(self, tests: LabelTests) -> None:
        """Test all margins."""
        p = p_values(*self.hits, self.instances, threshold=MARGIN)
        labels = np.broadcast_to(np.array([f"syntactic:{label}" for label in self.labels]), p.shape)
        tests.add(
            self.site_layer,
            "syntactic_margin",
            labels,
            self.margin,
            p,
            threshold=MARGIN,
            counts=self.instances,
            baseline=self.baseline.value,
            rate=Rate("of such words", "at the best fixed offset", value=self.accuracy.value),
        )

    def best(self, min_instances: int) -> tuple[Estimate, dict[HeadId, str]]:
        """The largest margin of each head with its interval, and by head the relation's label."""
        counts = self.instances.sum(dim=(0, 1)).numpy()  # [c]
        has_enough = counts >= (min_instances if (counts >= min_instances).any() else 1)
        cells = np.where(has_enough, self.margin.value, -np.inf).argmax(axis=1)
        heads = head_ids(self.site_layer, len(cells)) if has_enough.any() else []
        labels = {head: self.labels[cell] for head, cell in zip(heads, cells, strict=False)}
        return self.margin.at((np.arange(len(cells)), cells)), labels

    def table(self, p_adjusted: Array, *, fewest: int) -> pd.DataFrame:
        """One row for each relation and direction with at least `fewest` instances, and each head."""
        counts = self.instances.sum(dim=(0, 1)).numpy()  # [c]
        cells = np.flatnonzero(counts >= fewest)
        heads = len(self.accuracy.value)
        cell, head = np.repeat(cells, heads), np.tile(np.arange(heads), len(cells))
        labels = [self.labels[number] for number in cell]
        columns: dict[str, Any] = {
            "site": self.site_layer[0].value,
            "layer": self.site_layer[1],
            "head": head,
            "relation": [label[:-1] for label in labels],
            "direction": [DIRECTIONS[label[-1]] for label in labels],
            "label": labels,
            "count": counts[cell].astype(int),
            "baseline_offset": self.offsets[cell],
        }
        for name, estimate in (("accuracy", self.accuracy), ("baseline", self.baseline), ("margin", self.margin)):
            columns |= {column: values[head, cell] for column, values in estimate.columns(name).items()}
        return pd.DataFrame(columns | {"threshold": MARGIN, "p_adjusted": p_adjusted[head, cell]})


def _not_found(names: Sequence[str], tables: Sequence[pd.DataFrame], *, has_unaligned: bool) -> list[str]:
    """A remark on relations without an instance; `has_unaligned`: some sentences do not align with their parses."""
    present = {name for table in tables for name in table.relation}
    missing = [name for name in dict.fromkeys(names) if name not in present]
    if not missing:
        return []
    where = "sentences that are not cut and align with their parses" if has_unaligned else "parses"
    return [f"syntactic: the {where} have no {', '.join(missing)} (relations are those of UD 2, without subtypes)"]


class _Block(NamedTuple):
    """The index tensors for one block of queries, which belong to w words.

    `mean` [b w q] averages over the queries of a word; `words_before` and `words_after` are the indices, among the w,
    of words that began before the block and of words that continue after it. `due` [4 n] has the instances whose word
    ends in the block: row, index of the word, partner word, cell; `instances` [b cells], on the CPU, counts them.
    """

    mean: Tensor
    words_before: Tensor
    words_after: Tensor
    due: Tensor
    instances: Tensor


class _Plan:
    """Index tensors of one batch: which subwords make which word, and which words are related.

    Words are laid out [b w] up to the longest sentence; the n instances are relations in both directions. Built once a
    batch, on the CPU, and used for every layer. With `exclude_sinks` words lose the first token, and instances of words
    without other tokens are dropped.
    """

    def __init__(self, heads: HeadBatch, names: Sequence[str], *, exclude_sinks: bool) -> None:
        self.is_counted = False
        aligned = heads.key_side.aligned
        b, s = heads.key_side.ids.shape
        words = max([1, *(len(a.units) for a in aligned if a)])
        member = torch.zeros(b, words, s)
        aligned_instances = [_instances(row, a, names) for row, a in enumerate(aligned) if a is not None]
        instances = np.concatenate([*aligned_instances, np.empty((0, 4), dtype=np.int64)])  # [n 4]: row, cell, from, to
        for line, a in enumerate(aligned):
            for word, subwords in enumerate(a.units if a else ()):
                member[line, word, subwords] = 1.0
        if exclude_sinks:
            member *= heads.keys.cpu()[:, None]
            has_tokens = member.any(dim=-1).numpy()  # [b w]
            instances = instances[has_tokens[instances[:, :1], instances[:, 2:]].all(axis=1)]
        self.mean = member / member.sum(-1, keepdim=True).clamp(min=1)  # [b w s]
        self.row, cell, self.start, self.end = torch.from_numpy(instances).unbind(dim=1)
        self.cells = 2 * len(names)
        self.cell = self.row * self.cells + cell
        is_word = member.any(dim=-1)  # [b w]
        # the first and the last query of every word [b w]
        self.first = torch.where(is_word, member.argmax(dim=-1), s)
        self.last = torch.where(is_word, s - 1 - member.flip(-1).argmax(dim=-1), -1)
        self.instances = self._count(self.cell, 1)[..., 0]
        reach = 2 * REACH + 1
        offset = (self.end - self.start).clamp(-REACH, REACH) + REACH
        self.offsets = self._count(self.cell * reach + offset, reach)
        self.blocks: dict[tuple[int, int], _Block] = {}
        self.words_so_far = member[:0]
        device, dtype = heads.context.device, heads.context.dtype
        self.member = upload(member.to(dtype), device)  # [b w s]
        self.no_word = upload(~is_word, device)[:, None, None]  # [b 1 1 w]

    def _count(self, numbers: Tensor, per_cell: int) -> Tensor:
        """Counts of instances by number: [b cells each]."""
        b = len(self.mean)
        return torch.bincount(numbers, minlength=b * self.cells * per_cell).view(b, self.cells, per_cell).float()

    def block(self, heads: HeadBatch) -> _Block:
        """The index tensors for these heads' block of queries, the same for all layers."""
        queries = heads.span
        key = (queries.start, queries.stop)
        if key not in self.blocks:
            self.blocks[key] = self._block(queries, heads.context)
        return self.blocks[key]

    def _block(self, queries: slice, like: Tensor) -> _Block:
        occurs = (self.first < queries.stop) & (self.last >= queries.start)  # [b w]
        block_words = occurs.any(dim=0).nonzero()[:, 0]
        words = [self.mean[:, block_words, queries].to(like.dtype)]
        for at in (queries.start, queries.stop):  # words that began before the block, and that continue after it
            goes_on = ((self.first < at) & (self.last >= at)).any(dim=0)
            words.append(torch.searchsorted(block_words, goes_on.nonzero()[:, 0]))
        last = self.last[self.row, self.start]
        due = ((last >= queries.start) & (last < queries.stop)).nonzero()[:, 0]
        word = torch.searchsorted(block_words, self.start[due])
        indices = torch.stack([self.row[due], word, self.end[due], self.cell[due]])
        mean, before, after, on_device = (upload(part, like.device) for part in (*words, indices))
        return _Block(mean, before, after, on_device, self._count(self.cell[due], 1)[..., 0])

    def hits(self, heads: HeadBatch, block: _Block) -> Tensor:
        """Whether the word of each instance that ends in the block puts its largest weight on its partner [n h].

        Weights are summed to word level. Those of a word that continues in the next block of queries are kept.
        """
        to_words = torch.einsum("bhts,bws->bhtw", heads.weights, self.member)
        words = torch.einsum("bhtv,bwt->bhwv", to_words, block.mean)  # [b h w v]
        if len(block.words_before):
            words.index_add_(2, block.words_before, self.words_so_far)
        if len(block.words_after):
            self.words_so_far = words.index_select(2, block.words_after)
        _, argmax_position = max_and_position(words.masked_fill(self.no_word, -1.0))  # [b h w]
        row, word, end, _ = block.due
        is_hit: Tensor = argmax_position[row, :, word] == end[:, None]
        return is_hit.float()


def _instances(row: int, aligned: Aligned, names: Sequence[str]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Both directions of every wanted relation: [n 4] with columns row, cell, from, to."""
    columns = {name: 2 * index for index, name in enumerate(names)}
    relations = [(columns[name], head, dependent) for name, head, dependent in aligned.relations if name in columns]
    rows = [(row, cell, head, dependent) for cell, head, dependent in relations]
    rows += [(row, cell + 1, dependent, head) for cell, head, dependent in relations]
    return np.array(rows, dtype=np.int64).reshape(-1, 4)
