"""Alignment: how often a decoder's head looks at the source word that is aligned with a target word."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio, interval, units_of
from headscope.config import LabelOptions, option
from headscope.config.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.data.batching import DEFAULT_LIMIT
from headscope.data.corpus import Corpus
from headscope.data.encoded import pad_side
from headscope.data.template import unscramble
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.engine.evidence.aligned_heads import (
    TemplateWords,
    count_hits,
    joint_error_rates,
    template_report,
    template_words,
)
from headscope.engine.evidence.report import (
    Aggregates,
    AnalysisReport,
    LabelTests,
    Rate,
    evidence_signature,
    head_table,
)
from headscope.engine.evidence.significance import above_chance, share_p
from headscope.engine.heads.linked_words import AHEAD, LinkedWords, mark_distinct
from headscope.engine.heads.sentence_links import SentenceLinks, links_of, links_of_recordings
from headscope.errors import ConfigError, flag, flags
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer

SHARE = 0.4
TIMES = {"hard_even": 2.0, "hard_shuffled": 1.0}
"""By baseline, the least ratio of a labelled head's share at hard positions to the baseline's."""
BASELINES = ("offset", "diagonal", "even", "shuffled", *TIMES)
LABEL_RELATIONS = ("predicted", "fed")
MAX_ALIGNED_SENTENCES = 512
"""Filled templates whose word weights are kept, for the error rate of several heads together."""


@dataclass(frozen=True)
class AlignmentOptions(LabelOptions):
    """Options of `alignment`."""

    alignments: Path | None = option(
        None, "Which words belong together: links i-j (i?j: possible), source-target, a line each.", metavar="FILE"
    )
    alignments_first: int = option(
        0, "Number of the first word in --alignments, 0 or 1.", metavar="N", minimum=0, maximum=1, needs="alignments"
    )
    align_corpus: Path | None = option(
        None, "Parallel corpus to train the aligner on, its source (.gz too); default: the text.", metavar="FILE"
    )
    align_target: Path | None = option(None, "The target lines of --align-corpus.", metavar="FILE")
    word_times: Path | None = option(
        None, "When words of recordings are said: a CSV of recording, word, begin, end (seconds).", metavar="FILE"
    )


@analysis
class Alignment(Analysis):
    """Share of decoder positions whose largest weight is on a source word aligned with a target word.

    Position t is fed token y[t] and predicts y[t+1]: `aligned_predicted` is about the word of y[t+1], `aligned_fed` of
    y[t], `aligned_next` of y[t+2]. Only positions whose word has a link count. Words are separated by spaces and tabs.
    Links come from `alignments` (Pharaoh format), or from fast_align's model (Dyer et al. 2013) trained on
    `align-corpus`, or on the text if it has 1,000 lines.

    `aer_…` = 1 − (|A∩S| + |A∩P|) / (|A| + |S|) over words (Och & Ney 2003): A pairs a word with the argmax of each of
    its positions; S are its sure links, P all. `source_coverage`: share of source words that are some argmax.
    `monotonicity`: share of moves of the argmax that go right. `final_punctuation`, `end_of_sentence`: mean weights
    there. `alignment_score` needs no links: (Σ_t‖w_t‖₂ + Σ_s‖w_s‖₂) / (t + s) (arXiv 2509.09987). For recordings,
    encoder positions stand for source words and are linked by `word-times`; `aligned_lag` is the time from the first
    position of the word of y[t+1] to the argmax.

    Labels `aligned:predicted` and `aligned:fed`: a share of at least 0.4, and at hard positions (neither the best fixed
    offset nor the diagonal is aligned) at least twice the share of even weight, and more than with the links of another
    sentence.

    Decoder language models need `--target` and `--template`: weights of decoder-self heads on the source's subwords.
    `aligned_fed` takes the query at a target word's last subword, `aligned_predicted` the one before its first, and
    `aligned_successor` counts the source word after the one that is linked to the fed word. `lift_…` is the share minus
    that of rolled links, each at the next source word; in `lift_…_scrambled` source words are in random order, and
    links move along. Labels: a lift of at least 0.2 in both. `alignment_together.csv` has error rates of the mean
    weights of several heads: of those with `aligned:fed`, and of the five best heads of one half of the texts on the
    other half.
    """

    name = "alignment"
    reads = "contexts"
    version = 3
    passes = frozenset({"text", "scrambled"})
    order = 65
    decoder_needs = ("target", "template")
    summary = "share of positions whose largest weight is on the aligned source word"
    measures = (
        Measure("aligned_predicted", "argmax on the source of the next word", range=(0, 1)),
        Measure("aligned_fed", "argmax on the source of the word read", range=(0, 1)),
        Measure("aligned_next", "argmax on the source of the word after", range=(0, 1)),
        Measure("aligned_successor", "argmax after the source of the word read", range=(0, 1), needs="template"),
        *(
            Measure(f"lift_{name}{run}", f"share beyond rolled links, {name}{words}", range=(-1, 1), needs="template")
            for name in ("fed", "predicted", "successor")
            for run, words in (("", ""), ("_scrambled", ", scrambled source"))
        ),
        Measure("aer_predicted", "alignment error rate, predicted word", range=(0, 1)),
        Measure("aer_fed", "alignment error rate, word read", range=(0, 1)),
        Measure("aer_next", "alignment error rate, word after", range=(0, 1)),
        Measure("aligned_lag", "argmax behind the begin of the next word", unit="s", signed=True, needs="word_times"),
        Measure("source_coverage", "source words looked at", range=(0, 1)),
        Measure("monotonicity", "moves to the right", range=(0, 1)),
        Measure("final_punctuation", "weight on final punctuation", range=(0, 1)),
        Measure("end_of_sentence", "weight on the end of the source", range=(0, 1)),
        Measure("alignment_score", "unsupervised alignment score", range=(0, 1)),
    )
    functions = (HeadFunction("aligned", "⇄", "A", "#ddcc77", "aligned: looks at the word's translation", order=4),)
    figures = (
        AnalysisFigure(
            "alignment",
            "Share of positions at which heads look at the aligned word, beside the baseline.",
            "headscope.report.figures.layers:draw_alignment",
        ),
    )
    sites = frozenset({Site.CROSS, Site.DECODER_SELF})
    Options = AlignmentOptions
    merges = ("n_unlocated", "word_weights", "tables")

    links: SentenceLinks | None = None
    offsets: Mapping[str, int]
    n_unlocated = 0
    word_weights: dict[int, dict[int, Tensor]]
    tables: dict[int, tuple[Any, Any]]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        return "is for decoders that read another text than the encoder" if checkpoint.rereads_source else None

    def sample(self, corpus: Corpus) -> Corpus | str:
        if corpus.has_template or self.checkpoint.two_sided:
            return corpus
        return f"needs {flags(*self.decoder_needs)}, which say how a text holds both"

    def read(self, corpus: Corpus) -> None:
        options = self.options
        self.offsets, self.word_weights, self.tables = {}, {}, {}
        if self.checkpoint.reads_sound:
            self.links = links_of_recordings(corpus, self.checkpoint, options.word_times)
        elif options.word_times is not None:
            raise ConfigError(f"{flag.word_times} is of recordings, and this model reads text; give {flag.alignments}")
        elif corpus.has_template or self.checkpoint.two_sided:
            training = options.align_corpus, options.align_target
            self.links = links_of(corpus, options.alignments, first=options.alignments_first, training=training)
        if self.links is not None and self.checkpoint.two_sided:
            self.offsets = self._offsets(self.links)

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        if heads.site is Site.DECODER_SELF:
            return {} if self.checkpoint.two_sided else self._observe_template(heads)
        plan: LinkedWords = heads.of_batch.get("alignment plan", heads.batch, lambda: self._plan(heads))
        argmax, on_end, score = _argmax_and_score(heads, plan.ends)  # [b h t], [b h t 2]
        queries = heads.queries
        moves = argmax.diff(dim=-1) * (queries[:, 1:] & queries[:, :-1])[:, None]
        ratios = {
            "alignment_score": score,
            "monotonicity": Ratio((moves > 0).sum(-1).float(), (moves != 0).sum(-1).float()),
        }
        for number, name in enumerate(("final_punctuation", "end_of_sentence")):
            ratios[name] = heads.over_queries(on_end[..., number])
        words = plan.source_word[:, None].expand(-1, argmax.shape[1], -1).gather(-1, argmax)  # [b h t]
        visible_words = torch.where(queries[:, None], words, -1)
        ratios["source_coverage"] = Ratio(mark_distinct(visible_words).sum(-1).float(), plan.source_words[:, None])
        if self.options.word_times is not None:
            ratios["aligned_lag"] = plan.lag(argmax)
        for name, offset in self.offsets.items():
            ratios |= plan.relation(name, words, offset)
            if not plan.is_counted:  # the same for every layer: kept once, at the first
                ratios |= plan.baselines(name, offset)
        plan.is_counted = True
        return ratios

    def _observe_template(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        if self.links is None or not self.links.has_links or heads.batch.kind == "random":
            return {}
        texts: list[TemplateWords] = heads.of_batch.get("template words", heads.batch, lambda: self._words(heads))
        ratios, weights = count_hits(heads, texts)
        if heads.batch.kind == "scrambled":
            return {f"{name}_scrambled": ratio for name, ratio in ratios.items()}
        for number, text, source_weights in zip(heads.batch.indices.tolist(), texts, weights, strict=True):
            if number < MAX_ALIGNED_SENTENCES and source_weights.shape[1]:
                self.word_weights.setdefault(number, {})[heads.layer] = source_weights.cpu()
                self.tables[number] = text.links.numpy(), text.sure.numpy()
        return ratios

    def _words(self, heads: HeadBatch) -> list[TemplateWords]:
        assert self.links is not None
        sentences, side = heads.batch.sentences, heads.batch.on_host.source
        links = self.links.of([*map(unscramble, sentences)])
        return template_words(sentences, side, self.checkpoint, links, heads.context.device)

    def _plan(self, heads: HeadBatch) -> LinkedWords:
        assert self.links is not None
        sides, sentences = (heads.key_side, heads.query_side), heads.batch.sentences
        source, target = heads.batch.on_host.source, heads.batch.on_host.target
        assert target is not None
        plan = LinkedWords(sides, heads.keys, sentences, self.checkpoint, self.links, host=(source, target))
        self.n_unlocated += plan.n_unlocated
        return plan

    def _offsets(self, links: SentenceLinks) -> dict[str, int]:
        if not links.donors:
            return {}
        texts = [example.source for example in links.donors], [example.target or "" for example in links.donors]
        source = pad_side(self.checkpoint.encode(texts[0], side="source", limit=DEFAULT_LIMIT))
        target = pad_side(self.checkpoint.encode(texts[1], side="target", limit=DEFAULT_LIMIT))
        keys = source.real & ~source.special
        return LinkedWords((source, target), keys, links.donors, self.checkpoint, links).best_offsets()

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report, tests, tables = AnalysisReport(), LabelTests.of(self.options), []
        if aggregates.site_layers("lift_fed"):
            report = template_report(aggregates, tests)
            if self.word_weights:
                labelled_heads = [head for head, labels in report.labels.items() if "aligned:fed" in labels]
                together = joint_error_rates(self.word_weights, self.tables, labelled_heads)
                report.tables["alignment_together"] = together
        report.remarks += [] if self.links is None else self.links.remarks
        if "alignment" in report.tables:
            return report
        if self.n_unlocated:
            report.remarks += [f"alignment: subwords of {self.n_unlocated} texts cannot be located; they have no words"]
        columns: dict[str, dict[SiteLayer, Estimate]] = {}
        for name in AHEAD:
            for site_layer in aggregates.site_layers(f"aligned_{name}"):
                share, aer, rows = self._relation(aggregates, name, site_layer, tests)
                columns.setdefault(f"aligned_{name}", {})[site_layer] = share
                if self.options.word_times is None:  # else positions are no words, whose error rate it would be
                    columns.setdefault(f"aer_{name}", {})[site_layer] = aer
                tables.append(rows)
        tests.conclude(report)
        report.columns = {
            name: columns.get(name) or aggregates.column(name)
            for name in (measure.name for measure in self.measures)
            if name in columns or aggregates.site_layers(name)
        }
        if tables:
            report.tables["alignment"] = pd.concat(tables, ignore_index=True)
        return report

    def _relation(
        self, aggregates: Aggregates, name: str, site_layer: SiteLayer, tests: LabelTests
    ) -> tuple[Estimate, Estimate, pd.DataFrame]:
        """The share and the error rate [h] of one relation at one (site, layer), and its table; tests its labels."""
        first = aggregates.site_layers(f"others_{name}")[0]
        hits, count = aggregates.by_sentence(f"aligned_{name}", site_layer)  # [g h], [g 1]
        hard, hard_count = aggregates.by_sentence(f"hard_aligned_{name}", site_layer)
        simple_shares = aggregates.by_sentence(f"others_{name}", first)[0][:, None].unbind(dim=-1)  # [g 1] each
        chance = dict(zip(("offset", "diagonal", "even"), simple_shares, strict=True))
        chance |= {
            kind: aggregates.by_sentence(f"{kind}_{name}", site_layer)[0] for kind in ("shuffled", "hard_shuffled")
        }
        chance["hard_even"] = aggregates.by_sentence(f"hard_even_{name}", first)[0]
        baselines = {
            kind: (part.sum(0) / (hard_count if kind in TIMES else count).sum(0)).expand(hits.shape[1]).numpy()
            for kind, part in chance.items()
        }
        share, hard_share = (aggregates.ratio(f"{part}aligned_{name}", *site_layer) for part in ("", "hard_"))
        aer, precision, recall = _error_rates(aggregates, name, site_layer)
        if name in LABEL_RELATIONS:
            p = [share_p(hits, count, threshold=SHARE)]
            for kind, times in TIMES.items():
                p.append(above_chance(hard, chance[kind].expand_as(hard), hard_count, threshold=0, times=times)[0])
            better = hard_share.value >= np.max([times * baselines[kind] for kind, times in TIMES.items()], axis=0)
            tests.add(
                site_layer,
                f"aligned_{name}",
                f"aligned:{name}",
                share,
                np.max(p, axis=0),
                threshold=np.where(better, SHARE, np.inf),
                counts=count,
                baseline=np.max([baselines[kind] for kind in TIMES], axis=0),
                rate=Rate(self.run.of_largest_weights, "at the best fixed offset", baseline=baselines["offset"]),
            )
        columns: dict[str, Any] = {
            **{"relation": name, "positions": int(count.sum()), "share": share, "hard_share": hard_share},
            **{"precision": precision, "recall": recall, "aer": aer},
            **{f"baseline_{kind}": baselines[kind] for kind in BASELINES},
            **{"offset": self.offsets[name], "hard_positions": int(hard_count.sum())},
        }
        return share, aer, head_table({site_layer: columns})

    def signature(self) -> dict[str, str]:
        links = "none" if self.links is None else self.links.name
        return {"links": links, **evidence_signature(self.options)}


def _argmax_and_score(heads: HeadBatch, ends: Tensor) -> tuple[Tensor, Tensor, Ratio]:
    """The argmax [b h t], the weight on `ends` [b s 2] as [b h t 2], and the alignment score.

    The score is the mean norm of the rows and columns of the weights on counted keys.
    """
    rows = columns = torch.zeros((), device=heads.context.device)
    argmax, on_end = [], []
    for block in heads.in_blocks():
        argmax.append(block.maximum.position)
        on_end.append(block.weight_on(ends))
        squares = block.weights.square() * block.keys[:, None, None] * block.queries[:, None, :, None]
        rows = rows + squares.sum(-1).sqrt().sum(-1)  # [b h]
        columns = columns + squares.sum(2)  # [b h s]
    count = (heads.queries.sum(-1) + heads.keys.sum(-1) * heads.queries.any(-1)).to(rows.dtype)
    score = Ratio(rows + columns.sqrt().sum(-1), count[:, None])
    return torch.cat(argmax, dim=2), torch.cat(on_end, dim=2), score


def _error_rates(aggregates: Aggregates, name: str, site_layer: SiteLayer) -> tuple[Estimate, Estimate, Estimate]:
    """Alignment error rates, precisions and recalls [h] of a relation at one (site, layer)."""
    sizes, due = aggregates.bootstrap.sums(aggregates.sums[(f"links_{name}", *site_layer)])  # [1+r h 3]
    units = units_of(aggregates.by_sentence(f"links_{name}", site_layer)[1][..., 0])
    (links, on_sure, on_link), sure = sizes.unbind(dim=-1), due[..., 0]
    rates = (1 - (on_sure + on_link) / (links + sure), on_link / links, on_sure / sure)
    aer, precision, recall = (interval(rate, units=units) for rate in rates)
    return aer, precision, recall
