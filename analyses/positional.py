"""Attention by position: offsets of the largest weight (Voita et al. 2019, §5), and even weight on one side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio, concatenate_estimates, interval
from headscope.config import LabelOptions, PublishedLabelOptions
from headscope.config.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.description.examples import MIN_VISIBLE_KEYS
from headscope.distributed import upload
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, LabelTests, Rate, analysis
from headscope.engine.evidence.significance import above_chance, share_p
from headscope.heads import Site, SiteLayer


@analysis
class Distance(Analysis):
    """Mean over queries of |query − argmax key| in subwords; self-attention.

    Special tokens are left out as queries and keys: a query whose weight is on one is measured by its largest weight
    among the others. So a head that always looks one token ahead has 2 − 2/n over n tokens, and a sink has the distance
    of small remainders.
    """

    name = "distance"
    reads = "rows"
    order = 30
    summary = "mean distance to the key with the largest weight"
    measures = (Measure("distance", "mean distance of the argmax", unit="tokens", range=(0, None)),)
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        offsets = heads.maximum.position - heads.positions
        distances = offsets.abs().to(heads.maximum.weight.dtype)  # [b h t]
        return {"distance": heads.over_queries(distances)}


THRESHOLD = 0.9
REACH = 512  # offsets beyond ±REACH are counted together


@analysis
class Positional(Analysis):
    """Share of queries whose largest weight lies at each offset (key − query, subwords); self-attention.

    A query counts at an offset only if a counted key stands there. Special tokens are left out as queries and keys,
    where Voita et al. (2019, §5.1) leave out the end only. `offset` is the mode among offsets that more than half of
    the queries have; offsets beyond ±512 are counted together and never it.

    Label `positional:N`: a share of at least 90 %; `label-rule=published` skips the test, as the paper does.
    """

    name = "positional"
    reads = "rows"
    version = 3
    order = 40
    summary = "histogram of argmax offsets; positional if one holds 90 %"
    measures = (
        Measure("offset", "modal offset", unit="tokens", signed=True),
        Measure("offset_share", "share of the modal offset", range=(0, 1)),
    )
    functions = (
        HeadFunction(
            "positional",
            "◆",
            "±n",
            "#56b4e9",
            "positional: looks n tokens ahead (+) or back (−)",
            order=1,
            detail="offset",
        ),
    )
    figures = (
        AnalysisFigure(
            "positional",
            "Offsets of the most attended token, head by head.",
            "headscope.report.figures.layers:draw_offsets",
            file="offsets",
        ),
    )
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})
    Options = PublishedLabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        offsets = heads.maximum.position - heads.positions
        b, h, t = offsets.shape
        reach = max(1, min(heads.keys.shape[1] - 1, REACH + 1))
        cells = (offsets if reach <= REACH else offsets.clamp(-reach, reach)) + reach  # [b h t]
        is_query, _ = heads.query_weights(torch.float32)
        histogram = torch.zeros(b, h, 2 * reach + 1, device=cells.device)
        histogram.scatter_add_(2, cells, is_query[:, None].expand(b, h, t))
        n_queries = heads.shared("queries by offset", lambda: _queries_by_offset(heads, reach))
        return {"offsets": Ratio(histogram, n_queries, centred=True, coarse=True)}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        offset: dict[SiteLayer, Estimate] = {}
        share: dict[SiteLayer, Estimate] = {}
        tables, tests = [], LabelTests.of(self.options)
        for site, layer in aggregates.site_layers("offsets"):
            sums = aggregates.sums["offsets", site, layer]
            middle = sums.total.shape[-1] // 2
            modes: list[tuple[Tensor, Estimate, Estimate]] = []
            for total, count in aggregates.bootstrap.parts(sums):  # [1+r h o], [1+r 1 o]
                shares, modal = total / count, _modal(total, count[0, 0])
                no_labels = ~count.any(dim=-1) | count.isnan().any(dim=-1)
                offsets = interval((modal - middle).double().masked_fill(no_labels, torch.nan))
                of_modal = interval(shares.gather(-1, modal[:1, :, None].expand(len(total), -1, 1))[..., 0])
                first = sum(len(cells) for cells, _, _ in modes)
                tables.append(_table((site, layer), first, total[0], count[0, 0], shares))
                modes.append((modal[0], offsets, of_modal))
            cells, of_offset, of_share = zip(*modes, strict=True)
            offset[site, layer], share[site, layer] = concatenate_estimates(of_offset), concatenate_estimates(of_share)
            modal = torch.cat(cells)  # [h]
            by_sentence, n_queries = aggregates.by_sentence("offsets", (site, layer))  # [g h o], [g 1 o]
            hits = by_sentence.gather(-1, modal[None, :, None].expand(len(n_queries), -1, 1))[..., 0]
            queries = n_queries[:, 0, modal]  # [g h]
            labels = np.array([f"positional:{cell - middle:+d}" for cell in modal.tolist()])
            tests.add(
                (site, layer),
                "offset_share",
                labels,
                share[site, layer],
                share_p(hits, queries, threshold=THRESHOLD),
                threshold=THRESHOLD,
                counts=queries,
                rate=Rate(self.run.of_largest_weights),
            )
        tests.conclude(report)
        report.columns = {"offset": offset, "offset_share": share}
        report.tables["positional"] = pd.concat(tables, ignore_index=True)
        return report


def _queries_by_offset(heads: HeadBatch, reach: int) -> Tensor:
    """The number of queries with a key at each offset [b 1 o], the same for all heads."""
    is_query, _ = heads.query_weights(torch.float32)
    visible = (heads.visible & heads.keys[:, None]).float()
    return queries_by_offset(is_query, visible, heads.first_query, reach)


def queries_by_offset(is_query: Tensor, visible: Tensor, first: int, reach: int) -> Tensor:
    """The number of queries with a visible key at each offset of ±`reach` [b 1 2·reach+1]; end cells hold all beyond.

    `is_query` [b q] is 1 for counted queries, which begin at position `first`; `visible` [b q s] is 1 if a query sees a
    key.
    """
    offsets = torch.arange(visible.shape[2]) - torch.arange(first, first + visible.shape[1])[:, None]  # [q s]
    cells = upload(offsets.clamp(-reach, reach) + reach, visible.device)
    has_key = torch.zeros(*visible.shape[:2], 2 * reach + 1, device=visible.device)
    has_key.scatter_add_(2, cells.expand_as(visible), visible)
    if bool(((offsets < -reach) | (offsets > reach)).any()):
        has_key.clamp_(max=1)
    return is_query[:, None] @ has_key


def _modal(total: Tensor, n_queries: Tensor) -> Tensor:
    """The offset's cell [1+r h] with most hits, of total [1+r h o], among offsets of more than half of the queries.

    `n_queries` [o] have a key at each offset. Of ties the first cell is taken.
    """
    is_candidate = (2 * n_queries > n_queries.max()) | (n_queries.max() == 0)
    if len(n_queries) // 2 > REACH:
        is_candidate[[0, -1]] = False  # the cells of all offsets beyond
    cells = is_candidate.nonzero()[:, 0]
    by_offset = total.permute(1, 2, 0)[:, cells].numpy()  # [h o 1+r], as it lies in memory
    return cells[torch.from_numpy(by_offset.argmax(axis=1))].T


def _table(site_layer: SiteLayer, first: int, counts: Tensor, n_queries: Tensor, shares: Tensor) -> pd.DataFrame:
    """One row for each head, from number `first` on, and each offset that occurs.

    From `counts` [h o] of hits, `n_queries` [o], and `shares` [1+r h o].
    """
    head, cell = counts.nonzero(as_tuple=True)
    by_cell = shares.flatten(1).T  # the way it lies in memory: rows are taken from it faster than columns
    share = interval(by_cell[head * counts.shape[-1] + cell].T)
    return pd.DataFrame(
        {
            "site": site_layer[0].value,
            "layer": site_layer[1],
            "head": head.numpy() + first,
            "offset": cell.numpy() - counts.shape[-1] // 2,
            "count": counts[head, cell].numpy().astype(int),
            "queries": n_queries[cell].numpy().astype(int),
            **share.columns("share"),
        }
    )


EVEN, SIDE, TIMES = 0.95, 0.5, 1.25
SIDES = ("after", "before")


@analysis
class Averages(Analysis):
    """The evenness of a query's weights on the keys on one side of it, and the weight of that side.

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
        weights_and_logs = heads.weights, heads.on_all_keys(heads.log_weights)
        weight, logs = (torch.einsum("bhts,bnts->bnht", of, sides.keys) for of in weights_and_logs)
        weight = weight.clamp(min=torch.finfo(weight.dtype).tiny)
        evenness = (weight.log() - logs / weight).div(sides.max_entropy).clamp(0, 1)  # entropy of w / Σ w
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
                p, thresholds = above_chance(weight, evenly, count, threshold=SIDE, times=TIMES)
                p = np.maximum(p, share_p(even, count, threshold=EVEN))
                share = columns[f"{side}_weight"][site_layer].value
                threshold = np.where(share >= thresholds, EVEN, np.inf)  # on the side that has the weight
                chance = (evenly.sum(dim=0) / count.sum(dim=0)).numpy()
                rate = Rate("of its weight", value=share, baseline=chance)
                label, measure = f"averages:{side}", f"{side}_evenness"
                tests.add(site_layer, measure, label, evenness, p, threshold=threshold, counts=count, rate=rate)
        tests.conclude(report)
        return report


class _Sides(NamedTuple):
    """The counted keys [b n t s] on each of n sides of a query, and the `queries` [b n t 1] with several of them.

    `max_entropy` [b n 1 t] is ln of the number of keys, `instances` [b n 1] the number of these queries, `chance`
    [b n 1] the sum of the shares that the keys are of all visible ones.
    """

    keys: Tensor
    max_entropy: Tensor
    queries: Tensor
    instances: Tensor
    chance: Tensor

    @classmethod
    def of(cls, heads: HeadBatch) -> _Sides:
        dtype, first = heads.context.dtype, heads.first_query
        everywhere = (heads.visible & heads.keys[:, None]).to(dtype)
        keys = torch.stack([everywhere.triu(first + 1), everywhere.tril(first - 1)], dim=1)
        number = keys.sum(dim=-1)  # [b n t]
        queries = (heads.queries[:, None] & (number >= MIN_VISIBLE_KEYS)).to(dtype)
        share = number / heads.visible.sum(dim=-1).clamp(min=1)[:, None]
        max_entropy = number.clamp(min=2).log()[:, :, None]
        instances, chance = (of.sum(dim=-1, keepdim=True) for of in (queries, queries * share))
        return cls(keys, max_entropy, queries[..., None], instances, chance)
