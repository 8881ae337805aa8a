"""Attention sinks: the weight on the first key, on special tokens, and on tokens with massive activations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from headscope.attribution.residual_stream import layer_block, seen_states
from headscope.bootstrap import Ratio
from headscope.config import LabelOptions, option
from headscope.config.declarations import HeadFunction, Measure
from headscope.data.encoded import Side, side_names
from headscope.distributed import fetch
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, LabelRule, Rate, RunOptions, analysis
from headscope.errors import CheckpointError
from headscope.formats.base import Checkpoint
from headscope.heads import Site, SiteLayer

RESTING = 0.9  # share of queries with half of their weight on a sink, from which on the head is said to rest there
HALF = 0.5 - 1e-6  # less by rounding
MEASURES = ("sink", "sink_special")


@analysis
class Sink(Analysis):
    """Mean over queries of the weight on the first key (`sink`, Xiao et al. 2023) and on special tokens.

    The first position is no query in self-attention. `sink_queries`, `sink_special_queries`: shares of queries with
    half of their weight there; from 0.9 on the head is said to rest there, whatever the query.

    Label `sink`: `sink` or `sink_special` of at least 0.5, and twice that of even weights.
    """

    name = "sink"
    reads = "rows"
    version = 4
    order = 90
    summary = "mean weight on the first key, and on special tokens"
    measures = (
        Measure("sink", "weight on the first key", range=(0, 1)),
        Measure("sink_special", "weight on special tokens", range=(0, 1)),
        Measure("sink_queries", "queries with half of their weight on the first key", range=(0, 1)),
        Measure("sink_special_queries", "queries with half of their weight on special tokens", range=(0, 1)),
    )
    functions = (HeadFunction("sink", "▼", "s", "#cc79a7", "sink: looks at first or special tokens", order=7),)
    Options = LabelOptions
    rules = tuple(LabelRule("sink", name, 0.5, chance=f"{name}_chance") for name in MEASURES)
    merges = ("first", "special")

    def __init__(self, run: RunOptions) -> None:
        super().__init__(run)
        self.first: dict[Site, set[int]] = {}
        self.special: dict[Site, set[int]] = {}

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        heads.cached_per_batch("sink ids", lambda: self._note_ids(heads))
        later = heads.shared("later", lambda: _later(heads))  # [b t]
        columns = heads.cached_per_batch("sinks", lambda: _sinks(heads))  # [b s 2]
        weight = heads.weight_on(columns)  # [b h t 2]
        even = heads.shared("evenly", lambda: heads.over_queries(heads.evenly_on(columns), only=later))
        resting = (weight >= HALF).to(weight.dtype)
        ratios = {name: heads.over_queries(weight[..., index], only=later) for index, name in enumerate(MEASURES)}
        for index, name in enumerate(MEASURES):
            ratios[f"{name}_queries"] = heads.over_queries(resting[..., index], only=later)
            ratios[f"{name}_chance"] = Ratio(even.total[:, index, None].expand(weight.shape[:2]), even.count)
        return ratios

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        shares = {name: report.columns[f"{name}_queries"] for name in MEASURES if f"{name}_queries" in report.columns}
        by_head: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in report.evidence:
            by_head.setdefault((row["site"], row["layer"], row["head"], row["given"]), []).append(row)
        for (site, layer, head, _), rows in by_head.items():
            resting = {name: float(of[Site(site), layer].value[head]) for name, of in shares.items()}
            text = self._description(Site(site), rows, resting)
            for row in rows:
                row["description"] = text
        return report

    def _description(self, site: Site, rows: Sequence[Mapping[str, Any]], resting: Mapping[str, float]) -> str:
        """One head's label in words, from its `rows`: it rests on a sink whatever the query, or its mean weight."""
        for row in rows:
            if resting[row["measure"]] >= RESTING:
                share = f"{resting[row['measure']]:.2f} of its queries give half of their weight or more"
                return f"rests on {self._place(site, row['measure'])}, whatever the query: {share}"
        return f"{rows[0]['value']:.2f} of its weight, on average, is on {self._place(site, rows[0]['measure'])}"

    def _place(self, site: Site, measure: str) -> str:
        """The keys of a measure in words, or the token itself if it is the same special one in all sentences."""
        special = self.special[site]
        words, tokens = ("the first token", self.first[site]) if measure == "sink" else ("special tokens", special)
        if len(tokens) == 1 and tokens <= special:
            return self.checkpoint.subwords([*tokens], side=side_names(site)[1])[0] or words
        return words

    def _note_ids(self, heads: HeadBatch) -> None:
        side = heads.batch.on_host.sides(heads.site)[1]
        self.first.setdefault(heads.site, set()).update(side.ids[:, 0].tolist())
        self.special.setdefault(heads.site, set()).update(side.ids[side.special & side.real].unique().tolist())


def _later(heads: HeadBatch) -> Tensor:
    """The queries over which `sink` is averaged: in self attention all but the first position."""
    later = heads.queries.clone()
    later[:, : 0 if heads.site is Site.CROSS or heads.first_query else 1] = False
    return later


def _sinks(heads: HeadBatch) -> Tensor:
    """The indicators of the first key, and of special tokens [b s 2]."""
    special = heads.key_side.special
    first = (torch.arange(special.shape[1], device=special.device) == 0).expand_as(special)
    return torch.stack([first, special], dim=-1).to(heads.context.dtype)


MAX_TOKENS = 20  # tokens of each layer in massive.csv
SITES = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})


@dataclass(frozen=True)
class MassiveOptions(LabelOptions):
    """Options of `massive`."""

    massive_magnitude: float = option(
        100.0, "What an activation must exceed to be massive.", metavar="NUMBER", minimum=0
    )
    massive_ratio: float = option(
        1000.0, "How many times the median of its sentence it must be besides.", metavar="NUMBER", minimum=1
    )


@analysis
class Massive(Analysis):
    """Mean over queries of the weight on tokens with a massive activation (Sun et al. 2024, §2).

    A token is massive at a layer if the largest absolute entry of its residual stream is above 100
    (`massive-magnitude`) and 1,000 times the sentence's median (`massive-ratio`). Queries count that see such a
    token other than themselves. `massive_chance` is that of even weights. massive.csv lists the tokens.

    Label `massive`: at least 0.5 and twice chance.
    """

    name = "massive"
    reads = "contexts"
    version = 2
    order = 92
    default = False
    sites = SITES
    summary = "mean weight on tokens whose states have massive activations"
    measures = (
        Measure("massive", "weight on massive tokens", range=(0, 1)),
        Measure("massive_chance", "share of massive tokens among keys", range=(0, 1)),
    )
    functions = (HeadFunction("massive", "⬢", "M", "#661100", "looks at tokens with massive activations", order=12),)
    Options = MassiveOptions
    rules = (LabelRule("massive", "massive", 0.5, chance="massive_chance", rate=Rate("of its weight, on average")),)
    signature_entry = "massive:{massive_magnitude:g},{massive_ratio:g}x"
    merges = ("n_tokens", "tokens")

    blocks: dict[SiteLayer, nn.Module]
    states: dict[nn.Module, Tensor]
    tokens: dict[tuple[Site, int, int, bool], list[tuple[int, float, float]]]
    n_tokens: dict[SiteLayer, int]
    waiting: list[tuple[SiteLayer, Side, Tensor]]

    @classmethod
    def applies(cls, checkpoint: Checkpoint) -> str | None:
        for part in checkpoint.attention_sites.order:
            attention = checkpoint.model.get_submodule(part.name)
            if part.site in SITES and layer_block(checkpoint.model, checkpoint, part.site_layer) is attention:
                return f"the layer of {part.site}.{part.layer} cannot be told: its attention is in no list of layers"
        return None

    def inspect(self, checkpoint: Checkpoint) -> None:
        super().inspect(checkpoint)
        site_layers = [
            site_layer for site_layer, heads in checkpoint.layout.items() if heads and site_layer[0] in SITES
        ]
        self.blocks = {site_layer: layer_block(checkpoint.model, checkpoint, site_layer) for site_layer in site_layers}
        self.states, self.tokens, self.n_tokens, self.waiting = {}, {}, {}, []

    @contextmanager
    def hooks(self, checkpoint: Checkpoint) -> Iterator[None]:
        with seen_states({*self.blocks.values()}, lambda block, x: self.states.update({block: x.detach()})):
            yield

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        states = self.states.pop(self.blocks[heads.site, heads.layer], None)
        if states is None or states.shape[:2] != heads.queries.shape:
            raise CheckpointError(f"what {heads.site}.{heads.layer} reads cannot be seen; leave out massive")
        real, absolute = heads.key_side.real, states.abs() if states.dtype is torch.float64 else states.abs().float()
        magnitude = absolute.amax(dim=-1).masked_fill(~real, 0.0)  # of every token [b t], and of every sentence [b]
        median = absolute.masked_fill(~real[..., None], torch.nan).flatten(1).nanmedian(dim=1).values
        massive = real & (magnitude > self.options.massive_magnitude)
        massive &= magnitude >= self.options.massive_ratio * median[:, None]  # [b s]
        side, ratio = heads.batch.on_host.sides(heads.site)[1], magnitude / median[:, None]
        if self.waiting and self.waiting[0][1] is not side:
            self._settle()
        self.waiting.append(((heads.site, heads.layer), side, torch.stack([massive.to(ratio.dtype), magnitude, ratio])))
        positions = torch.arange(massive.shape[1], device=massive.device)

        columns = torch.stack([massive, torch.ones_like(massive)], dim=-1).to(heads.context.dtype)  # [b s 2]
        weights, sees_massive, visibles = [], [], []
        for block in heads.in_blocks():

            def is_other_massive(keys: slice, queries: slice = block.span) -> Tensor:  # [b q n]
                return massive[:, None, keys] & (positions[keys] != positions[queries, None])

            weight, sees_one = block.weight_on_pairs(None, is_other_massive, every_key=True)
            weights.append(weight)
            sees_massive.append(sees_one)
            visibles.append(block.visible_on(columns))
        weight, is_counted = torch.cat(weights, dim=2), torch.cat(sees_massive, dim=1)  # [b h t], [b t]
        visible_massive, visible = torch.cat(visibles, dim=1).unbind(dim=-1)  # [b t]; a query sees itself
        chance = (visible_massive - massive.to(weight.dtype)) / visible.clamp(min=1)
        return {
            "massive": heads.over_queries(weight, only=is_counted),
            "massive_chance": heads.over_queries(chance[:, None].expand_as(weight), only=is_counted),
        }

    def _settle(self) -> None:
        """Add the massive tokens of the last batch to the counts, with their magnitudes and ratios."""
        arrays = fetch([values for _, _, values in self.waiting])
        for (site_layer, side, _), (massive, magnitude, ratio) in zip(self.waiting, arrays, strict=True):
            self.n_tokens[site_layer] = self.n_tokens.get(site_layer, 0) + int(side.real.sum())
            first, where = side.real.long().cumsum(dim=1) == 1, massive.bool()
            kinds, which = torch.unique(2 * side.ids[where] + first[where], return_inverse=True)
            for number, kind in enumerate(kinds.tolist()):
                is_own = which == number
                values = (int(is_own.sum()), magnitude[where][is_own].max().item(), ratio[where][is_own].max().item())
                self.tokens.setdefault((*site_layer, kind // 2, bool(kind % 2)), []).append(values)
        self.waiting = []

    def state(self) -> dict[str, Any]:
        self._settle()
        return super().state()

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        self._settle()
        report = super().report(aggregates)
        report.tables["massive"] = self._table()
        if not self.tokens:
            report.remarks.append(
                f"massive: no activation is above {self.options.massive_magnitude:g} and "
                f"{self.options.massive_ratio:g} times the median of its sentence"
            )
        return report

    def _table(self) -> pd.DataFrame:
        rows, row_counts = [], dict.fromkeys(self.n_tokens, 0)
        tokens = {}
        for key, batches in self.tokens.items():
            counts, sizes, ratios = zip(*batches, strict=True)
            tokens[key] = sum(counts), max(sizes), max(ratios)
        order = sorted(tokens.items(), key=lambda item: (item[0][0].value, item[0][1], -item[1][0], item[0][2:]))
        for (site, layer, number, first), (count, largest, ratio) in order:
            row_counts[site, layer] += 1
            if row_counts[site, layer] <= MAX_TOKENS:
                token = self.checkpoint.subwords([number], side=side_names(site)[0])[0]
                share = count / self.n_tokens[site, layer]
                rows.append((site.value, layer, token, number, first, count, share, largest, ratio))
        names = "site layer token id first count share magnitude times_median"
        return pd.DataFrame(rows, columns=names.split())
