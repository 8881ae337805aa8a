"""Positional heads: the histogram of offsets between a query and its largest weight (Voita et al. 2019, §5)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio, interval, joined
from headscope.config import PublishedLabelOptions
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, Column, HeadBatch, analysis
from headscope.engine.declarations import AnalysisFigure, HeadFunction, Measure
from headscope.engine.evidence.labels import LabelTests, evidence_signature, is_published
from headscope.engine.evidence.significance import share_p
from headscope.heads import Site

THRESHOLD = 0.9
REACH = 512


@analysis
class Positional(Analysis):
    """Share of queries whose largest weight lies at each offset (key − query, in subwords); self attention.

    A head is positional if one offset holds at least 90 % of the queries (Voita et al. 2019, §5.1), on the evidence of
    `headscope.engine.evidence.labels`: one test a head, since no two offsets can hold more than half. With
    `--label-rule published` the estimate alone decides, as in the paper.
    Where several offsets tie, `offset` is the smallest; where no query counts, it is no number.
    Offsets beyond ±512 are counted together, as ±513, and are no modal offset.
    Special tokens are left out as queries and as keys. Causal heads have offset 0 as a trivial place at
    the first position; it counts as everywhere else.
    """

    name = "positional"
    reads = "statistics"
    joins_layers = True
    version = 2
    order = 40
    summary = "histogram of argmax offsets; positional if one holds 90 %"
    measures = (
        Measure("offset", unit="tokens", signed=True),
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
            "headscope.report.figures.offsets:offset_histograms",
            file="offsets",
        ),
    )
    sites = frozenset({Site.ENCODER_SELF, Site.DECODER_SELF})
    Options = PublishedLabelOptions

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        b, h, t = heads.argmax_position.shape
        reach = min(t - 1, REACH + 1)
        cells = heads.offsets.clamp(-reach, reach) + reach  # [b h t], 0 in the middle
        counted, count = heads.counted(torch.float32)
        histogram = torch.zeros(b, h, 2 * reach + 1, device=cells.device)
        histogram.scatter_add_(2, cells, counted[:, None].expand(b, h, t))
        return {"offsets": Ratio(histogram, count[..., None], centred=True, coarse=True)}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        offset: dict[tuple[Site, int], Estimate] = {}
        share: dict[tuple[Site, int], Estimate] = {}
        tables, tests = [], LabelTests(self.options.min_instances, published=is_published(self.options))
        for site, layer in aggregates.site_layers("offsets"):
            sums = aggregates.sums["offsets", site, layer]
            middle = sums.total.shape[-1] // 2
            chosen: list[tuple[Tensor, Estimate, Estimate]] = []
            for total, count in aggregates.bootstrap.parts(sums):  # [1+r h o], [1+r 1 1]
                shares, modal = total / count, _modal(total)
                offsets = interval((modal - middle).double().masked_fill(count[..., 0] == 0, torch.nan))
                of_modal = interval(shares.gather(-1, modal[:1, :, None].expand(len(total), -1, 1))[..., 0])
                tables.append(_table((site, layer), sum(len(cells) for cells, _, _ in chosen), total[0], shares))
                chosen.append((modal[0], offsets, of_modal))
            cells, of_offset, of_share = zip(*chosen, strict=True)
            offset[site, layer], share[site, layer] = joined(of_offset), joined(of_share)
            modal = torch.cat(cells)  # [h]
            by_sentence, queries = aggregates.by_sentence("offsets", (site, layer))  # [g h o], [g 1 1]
            hits = by_sentence.gather(-1, modal[None, :, None].expand(len(queries), -1, 1))[..., 0]
            tests.add(
                (site, layer),
                "offset_share",
                np.array([f"positional:{cell - middle:+d}" for cell in modal.tolist()]),
                share[site, layer],
                share_p(hits, queries[..., 0], threshold=THRESHOLD),
                threshold=THRESHOLD,
                counts=queries[..., 0],
            )
        tests.conclude(report)
        report.columns = [Column("offset", offset), Column("offset_share", share)]
        report.tables["positional"] = pd.concat(tables, ignore_index=True)
        return report

    def signature(self) -> dict[str, str]:
        return evidence_signature(self.options)


def _modal(total: Tensor) -> Tensor:
    """The cell of the most frequent offset [1+r h] of total [1+r h o]; the first where several tie."""
    by_offset, pooled = total.permute(1, 2, 0).numpy(), total.shape[-1] // 2 > REACH  # [h o 1+r], as it lies in memory
    near = by_offset[:, 1:-1] if pooled else by_offset  # without the ends, where offsets are counted together
    return torch.from_numpy(near.argmax(axis=1) + pooled).T


def _table(site_layer: tuple[Site, int], first: int, counts: Tensor, shares: Tensor) -> pd.DataFrame:
    """One row per head, from number `first` on, and offset that occurs; counts [h o], shares [1+r h o]."""
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
            "share": share.value,
            "share_low": share.low,
            "share_high": share.high,
        }
    )
