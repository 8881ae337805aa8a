"""Explained attention: the share that position, key tokens, word classes, pairs of words and syntax explain; labels."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Bootstrap, Estimate, Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.data.corpus import Corpus
from headscope.data.encoded import SideName, side_names
from headscope.description.examples import Examples, Sharpest, leading_pairs
from headscope.description.features import GROUPS
from headscope.description.pair_function import PAIR_FUNCTIONS, Masses, functions_for, sum_masses
from headscope.description.sample import (
    MAX_WEIGHTS,
    ChosenRows,
    SampleBlocks,
    SampledRows,
    Sampler,
    SiteSample,
    make_blocks,
)
from headscope.description.shares import FOLDS, ExplainedSums, explain_shares
from headscope.description.tokens import TokenReader, static_embeddings
from headscope.distributed import fetch, upload
from headscope.engine.base import Analysis, HeadBatch, analysis
from headscope.engine.evidence.report import Aggregates, AnalysisReport, LabelTests, Rate, evidence_signature
from headscope.engine.evidence.significance import above_chance, share_p
from headscope.engine.heads.head_batch import SharedTensors
from headscope.heads import Site, SiteLayer

MASS, TIMES = 0.5, 2.0  # least weight of a labelled head, and its least ratio to the baselines
MIN_SENTENCES, SINK_SHARE = 200, 1 / 3  # a remark for fewer; share of heads on sinks from which sinks are excluded
COLUMNS = ("explained", *(f"explained_{group}" for group in GROUPS), "explained_unmet", "beyond_sinks")


@dataclass(frozen=True)
class ExplainedOptions(LabelOptions):
    """Options of `explained`."""

    explained_rows: int = option(
        12_000, "Query rows of each site that descriptions are fitted to and tested on.", metavar="N", minimum=1
    )
    explained_steps: int = option(
        25, "Steps of each of their fits; those of pairs of words take twice as many.", metavar="N", minimum=1
    )


@analysis
class ExplainedShares(Analysis):
    """Share of a head's attention that a description explains on held-out sentences.

    A log-linear model p(k|q) ∝ exp Σ_f θ_f[φ_f(q, k)] of the weights, in groups added one after the other: *position*
    (offset, first key, special keys), *token* (the 300 most frequent keys, bands of others), *classes* (word class of
    query and key; same word, token or lemma), *lexical* (pairs of tokens, rank 16 over input embeddings), *syntax*
    (relation, where there is a parse). Share = (U − CE) / (U − H), with U the mean ln of visible keys, H the entropy of
    the weights, CE their cross-entropy under p: 1 where nothing is left, 0 where p is no better than even weights,
    clipped to [0, 1]. `explained_…` is what each group adds, `explained` the sum; heads near even weights have none.

    `explained-rows` queries are sampled. Sentences of even and odd number are fitted and held out in turn; L-BFGS
    with early stopping, so that shares depend slightly on batch sizes (lexical: 0.003 at 240 captions).
    `explained_unmet` is the share among keys never met with the query's token in fitting. Where more than a third of a
    site's heads rest on first or special tokens, and with `--exclude-sinks`, rows are renormalised beyond these;
    `beyond_sinks` is the weight there. Examples are beyond them always.

    Label `looks:NAME` (`headscope/pair_functions`): the mean weight on such keys is at least 0.5 and twice even weight,
    also where no fixed offset gives them away, and twice what position predicts. examples.csv has the sharpest queries,
    token_pairs.csv the highest-scored pairs.
    """

    name = "explained"
    reads = "rows"
    version = 5
    order = 66
    default = False
    group = "description"
    summary = "how much of each head position, tokens, classes, word pairs and syntax explain; what it looks at"
    measures = (
        Measure("explained", "explained by the description", range=(0, 1)),
        Measure("explained_position", "explained by position", range=(0, 1)),
        Measure("explained_token", "added by the key token", range=(0, 1)),
        Measure("explained_classes", "added by classes", range=(0, 1)),
        Measure("explained_lexical", "added by pairs of words", range=(0, 1)),
        Measure("explained_syntax", "added by syntax", range=(0, 1), needs="parse"),
        Measure("explained_unmet", "explained among pairs of words that never met", range=(0, 1)),
        Measure("beyond_sinks", "weight beyond sinks", range=(0, 1), needs="exclude_sinks"),
    )
    functions = (HeadFunction("looks", "◇", "l", "#bb9944", "looks at tokens of one kind", order=7),)
    figures = (
        AnalysisFigure(
            "explained",
            "What explains each head: stacked shares per head and per layer.",
            "headscope.report.figures.layers:draw_explained",
        ),
    )
    Options = ExplainedOptions
    sampled = True
    fits = True
    merges = ("samples", "examples")

    samples: dict[Site, SiteSample]
    examples: dict[Site, Examples]
    waiting: list[tuple[Site, int, list[ChosenRows], Tensor, Tensor]]
    waiting_sharp: list[tuple[Site, int, Sharpest]]
    sentences: int
    beyond: frozenset[Site] = frozenset()
    reader_of: dict[SideName, TokenReader]

    def read(self, corpus: Corpus) -> None:
        self.samples, self.examples, self.waiting, self.waiting_sharp = {}, {}, [], []
        self.sentences, self.reader_of = max(1, corpus.count), {}

    def _readers(self, site: Site) -> tuple[TokenReader, TokenReader]:
        for side in {*side_names(site)} - self.reader_of.keys():
            self.reader_of[side] = TokenReader.of(self.checkpoint, side)
        query, key = (self.reader_of[side] for side in side_names(site))
        return query, key

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        choices: list[ChosenRows] = heads.of_batch.get(
            f"{heads.site}/described", heads.batch, lambda: self._choose(heads)
        )
        first, numbers = heads.first_query, heads.batch.indices.tolist()
        keys = heads.keys & (heads.key_side.real.cumsum(dim=-1) > 1)
        beyond = replace(heads, keys=keys, of_batch=SharedTensors())  # tensors that layers share are of all keys
        maxima = *beyond.maximum, beyond.visible_keys
        self.waiting_sharp.append((heads.site, heads.layer, Sharpest.of(numbers, *maxima, heads.queries, first)))
        inside = []
        for part in choices:
            positions = part.positions[(part.positions >= first) & (part.positions < heads.span.stop)]
            inside += [part._replace(positions=positions)] if len(positions) else []
        if inside:
            line = torch.cat([torch.full_like(part.positions, part.row) for part in inside])
            at = torch.cat([part.positions for part in inside]) - first
            line, at = upload(torch.stack([line, at]), heads.context.device)
            self.waiting.append((heads.site, heads.layer, inside, heads.weights[line, :, at], heads.visible[line, at]))
        return {"largest_weight": heads.over_queries(heads.maximum.weight)}

    def _choose(self, heads: HeadBatch) -> list[ChosenRows]:
        """Choose the rows of this batch to keep; rows of earlier batches are moved to the CPU first."""
        self._settle()
        site, sides = heads.site, heads.batch.on_host.sides(heads.site)
        layout = self.checkpoint.layout
        every = sum(count for (of, _), count in layout.items() if of is site)
        sample = self.samples.setdefault(site, SiteSample())
        sampler = Sampler(
            self._readers(site),
            seed=self.run.seed,
            rows=-(-self.options.explained_rows // self.sentences),
            per_sentence=MAX_WEIGHTS // (every * min(self.sentences, self.options.explained_rows)),
            token_filter=self.run.token_filter,
        )
        examples = self.examples.setdefault(site, Examples())
        examples.forget()  # layers of a site see a batch one after the other, so only when the next one comes
        for row, number in enumerate(heads.batch.indices.tolist()):
            query, key = (side.ids[row][side.real[row]].numpy() for side in sides)
            examples.ids[number] = (query, key)
        return sampler.choose(heads.batch.on_host, site, sides, sample)

    def _settle(self) -> None:
        """Move the rows of earlier batches to the CPU, into the samples and examples."""
        rows = [part.float() for *_, weights, visible in self.waiting for part in (weights, visible)]
        arrays = fetch([*rows, *(sharp.queries for *_, sharp in self.waiting_sharp)])
        for (site, layer, choices, *_), weights, visible in zip(self.waiting, arrays[::2], arrays[1::2], strict=False):
            sample, sizes = self.samples[site], [len(part.positions) for part in choices]
            for part, own, own_visible in zip(choices, weights.split(sizes), visible.bool().split(sizes), strict=True):
                count = len(sample.tokens[part.number].key)
                rows_by_head = own[..., :count].transpose(1, 2).contiguous()  # [n s h]
                sample.add(layer, part.number, SampledRows(rows_by_head, own_visible[:, :count].contiguous()))
        for (site, layer, sharp), sharpest in zip(self.waiting_sharp, arrays[len(rows) :], strict=True):
            self.examples[site].add(layer, sharp._replace(queries=sharpest))
        self.waiting, self.waiting_sharp = [], []

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        self._settle()
        report, tests = AnalysisReport(), LabelTests.of(self.options)
        columns: dict[str, dict[SiteLayer, Estimate]] = {name: {} for name in COLUMNS}
        tables: dict[str, list[dict[str, Any]]] = {"examples": [], "token_pairs": [], "pair_functions": []}
        for site, sample in self.samples.items():
            about = {"site": site.value}
            tables["examples"] += [about | row for row in self.examples[site].rows(self._readers(site))]
            if len(torch.tensor([*sample.tokens]).fmod(FOLDS).unique()) < FOLDS:
                continue
            query_choice = self.run.token_filter
            if query_choice.exclude_sinks or (not query_choice.keep_special and sample.resting_share() > SINK_SHARE):
                self.beyond |= {site}
            for layers in sample.layers_by_view():
                embeddings = static_embeddings(self.checkpoint, site)
                sample_blocks = make_blocks(sample, layers, embeddings, exclude_sinks=site in self.beyond)
                fits, title = FOLDS * len(sample_blocks.inventory.groups()), f"describing heads of {site.value}"
                with aggregates.progress(title, fits, unit="fits") as step:
                    explanation = explain_shares(sample_blocks, steps=self.options.explained_steps, step=step)
                pairs = leading_pairs(sample_blocks, explanation.position, explanation.pairs, self._readers(site))
                tables["token_pairs"] += [about | row for row in pairs]
                beyond, bootstrap = site in self.beyond, aggregates.bootstrap
                estimates = _estimates(sample_blocks, explanation, bootstrap, site, beyond_sinks=beyond)
                for name, of_layers in estimates.items():
                    columns[name] |= of_layers
                functions = functions_for(site, [p for part in sample_blocks.pairs for p in part])
                sums = sum_masses(sample_blocks, functions, explanation.position)
                sentences = explanation.sentences
                rows = add_tests(tests, sums, sample_blocks, sentences, bootstrap, site, beyond_sinks=beyond)
                tables["pair_functions"] += rows
        tests.conclude(report)
        report.columns = {name: estimates for name, estimates in columns.items() if estimates}
        report.tables = {name: pd.DataFrame(rows) for name, rows in tables.items() if rows}
        report.remarks = self._remarks()
        return report

    def _remarks(self) -> list[str]:
        remarks = []
        if (count := max((len(sample.tokens) for sample in self.samples.values()), default=0)) < MIN_SENTENCES:
            result = f"shares on those held out come out lower than from {MIN_SENTENCES} or more"
            remarks.append(f"explained: {count} sentences are few; {result}")
        if n_skipped := max((sample.n_skipped for sample in self.samples.values()), default=0):
            remarks.append(f"explained: {n_skipped} sentences are too long to keep rows of their attention")
        return remarks

    def state(self) -> dict[str, Any]:
        self._settle()
        return super().state()

    def signature(self) -> dict[str, str]:
        names = PAIR_FUNCTIONS.names()
        digest = hashlib.sha1(",".join(names).encode()).hexdigest()[:8]
        beyond = [site.value for site in sorted(self.beyond)]
        return {
            "rows": f"{self.options.explained_rows},steps={self.options.explained_steps}",
            "groups": ",".join(GROUPS),
            "pairs": f"{len(names)}:{digest}",
            **({"parse": self.run.parse} if self.run.parse else {}),
            **({"beyond": "+".join(beyond)} if beyond else {}),
            **evidence_signature(self.options),
        }


def _estimates(
    sample: SampleBlocks, shares: ExplainedSums, bootstrap: Bootstrap, site: Site, *, beyond_sinks: bool
) -> dict[str, dict[SiteLayer, Estimate]]:
    """Explained shares of every group and of all, at each layer; with `beyond_sinks` also the weight beyond sinks."""
    estimates: dict[str, dict[SiteLayer, Estimate]] = {}
    before = torch.zeros_like(shares.room)
    ratios: dict[str, tuple[Tensor, Tensor]] = {}
    for group, gained_sum in shares.gains.items():
        ratios[f"explained_{group}"] = gained_sum - before, shares.room
        before = gained_sum
    ratios |= {"explained": (before, shares.room), "explained_unmet": shares.unmet}
    if beyond_sinks:
        ratios["beyond_sinks"] = sample.row_sums
    for name, (total, room) in ratios.items():
        for layer, heads in sample.layers:
            share = bootstrap.over_units(total[:, heads], room[:, heads], units=shares.sentences)
            ends = (np.clip(end, 0, 1) for end in (share.value, share.low, share.high))  # worse than even explains none
            estimates.setdefault(name, {})[site, layer] = Estimate(*ends)
    return estimates


def add_tests(
    tests: LabelTests,
    sums: Masses,
    sample: SampleBlocks,
    sentences: Tensor,
    bootstrap: Bootstrap,
    site: Site,
    *,
    beyond_sinks: bool = False,
) -> list[dict[str, Any]]:
    """Test every head and pair function; return the lines of pair_functions.csv."""
    lines: list[dict[str, Any]] = []
    if not sums.functions:
        return lines
    weight = "weight beyond sinks" if beyond_sinks else "weight"
    labels = np.array([f"looks:{function.name}" for function in sums.functions], dtype=object)
    names = ("mass", "hard_mass", "hard_position", "even", "hard_even", "count", "hard_count")
    parts = [getattr(sums, name).expand_as(sums.mass) for name in names]
    for layer, heads in sample.layers:
        site_layer = site, layer
        mass, hard, position, even, hard_even, count, hard_count = (part[:, heads].double() for part in parts)
        value = bootstrap.over_units(mass, count, units=sentences)
        p = [
            share_p(mass, count, threshold=MASS),
            above_chance(mass, even, count, threshold=0, times=TIMES)[0],
            *(above_chance(hard, chance, hard_count, threshold=0, times=TIMES)[0] for chance in (hard_even, position)),
        ]
        means = {"even": (even.sum(0) / count.sum(0)).numpy()}
        for name, part in (("hard_mass", hard), ("hard_even", hard_even), ("hard_position", position)):
            means[name] = (part.sum(0) / hard_count.sum(0)).numpy()
        with np.errstate(invalid="ignore"):
            hard_chance = np.fmax(means["hard_even"], means["hard_position"])
            better = (value.value >= TIMES * means["even"]) & (means["hard_mass"] >= TIMES * hard_chance)
        tests.add(
            site_layer,
            "pair_mass",
            np.broadcast_to(labels, value.value.shape),
            value,
            np.max(p, axis=0),
            threshold=np.where(better, MASS, np.inf),
            counts=count,
            baseline=np.fmax(means["even"], hard_chance),
            rate=Rate(f"of its {weight} where there is one, on average", baseline=means["even"]),
        )
        lines += _lines(site_layer, sums, value, means, (count.sum(0), hard_count.sum(0)))
    return lines


def _lines(
    site_layer: SiteLayer,
    sums: Masses,
    value: Estimate,
    means: Mapping[str, np.ndarray[Any, Any]],
    queries: tuple[Tensor, Tensor],
) -> list[dict[str, Any]]:
    """Lines of pair_functions.csv at one site and layer: every function that a query meets, every head.

    `queries` [h c] are those that see such a key, and the hard ones.
    """
    counts, hard = (part.round().long().tolist() for part in queries)
    return [
        {
            "layer": site_layer[1],
            "site": site_layer[0].value,
            "head": head,
            "function": function.name,
            **value.cell("mass", (head, number)),
            **{name: mean[head, number] for name, mean in means.items()},
            "offset": sums.offset[number],
            "queries": counts[head][number],
            "hard_queries": hard[head][number],
        }
        for number, function in enumerate(sums.functions)
        for head in range(len(value.value))
        if counts[head][number]
    ]
