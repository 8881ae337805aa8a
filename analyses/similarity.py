"""Similarity of the heads of a layer: cosine and L2 of contexts, linear CKA, Jensen–Shannon of weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headscope.bootstrap import Estimate, Ratio, interval
from headscope.config import option
from headscope.config.declarations import AnalysisFigure, Measure
from headscope.distributed import upload
from headscope.engine.aggregate import gram
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis
from headscope.heads import SiteLayer

NEAR = 0.02  # ratio ‖a − b‖² / (‖a‖² + ‖b‖²) below which a − b is computed directly
CONSTANT = 1e-6  # ratio of variance to second moment below which a context counts as constant
COSINE = Measure("cosine", "cosine of contexts", range=(-1, 1), signed=True)
PAIRS = (
    COSINE,
    Measure("l2", "L2 distance of contexts", range=(0, None), cmap="viridis_r"),
    Measure("cka", "linear CKA of contexts", range=(0, 1)),
)
DIVERGENCE = (
    Measure("js", "Jensen–Shannon divergence of weights", unit="nats", range=(0, math.log(2)), cmap="viridis_r"),
)


@dataclass(frozen=True)
class FigureOptions:
    """Options of the figure of similarities."""

    measure: str | None = option(
        None,
        f"What is compared: {', '.join(f'{pair.name} ({pair.label})' for pair in (*PAIRS, *DIVERGENCE))}; "
        f"default: {COSINE.name}.",
        metavar="NAME",
    )
    range: tuple[float, ...] = option((), "Range of the colours; default: that of the measure.", metavar="LOW,HIGH")


@analysis
class Similarity(Analysis):
    """Mean over tokens of cosine and L2 distance between heads' contexts, and linear CKA.

    Contexts of counted queries, before mixing and W_O. Cosine: Li et al. 2018 (disagreement on outputs); L2 per token
    (the MHR fork flattens sentences); CKA: Kornblith et al. 2019, over the whole corpus, its interval from 8 folds. A
    constant head has no CKA.
    """

    name = "similarity"
    reads = "contexts"
    order = 110
    summary = "cosine, L2 and linear CKA between the contexts of a layer's heads"
    measures = (
        Measure("similarity_cosine", "mean cosine with other heads", range=(-1, 1), signed=True),
        Measure("similarity_cka", "mean CKA with other heads", range=(0, 1)),
    )
    pairs = PAIRS
    figures = (
        AnalysisFigure(
            "similarity",
            "How alike the heads of each layer are; also from the MHR fork's cosine and L2 files.",
            "headscope.report.figures.layers:draw_similarity",
            Options=FigureOptions,
            from_pickle="headscope.report.fork:similarity_run",
        ),
    )

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        b, h, t, k = heads.context.shape
        row, index = heads.counted_indices  # [n]
        flat = heads.context.transpose(1, 2).reshape(b * t, h * k).index_select(0, index)  # [n d]
        first, second = heads.cached_per_batch(
            f"pairs/{h}", lambda: upload(torch.triu_indices(h, h), flat.device)
        )  # [p]: each once
        measures = pairwise_similarity(flat.view(-1, h, k))  # [n h h]
        sums = flat.new_zeros(2, b, h, h)
        for total, values in zip(sums, measures, strict=True):
            total.index_add_(0, row, values)
        pairs = sums.transpose(0, 1)[..., first, second]  # [b 2 p]
        count = heads.query_weights(flat.dtype)[1][:, None]  # [b 1 1]
        tokens = heads.cached_per_batch("tokens", lambda: count.sum()[None])
        blocks = gram(flat).view(h, k, h, k).transpose(1, 2)[first, second]  # [p k k]
        return {
            "pairs": Ratio(pairs, count, coarse=True),  # cosine and L2
            "moments": Ratio(blocks[None], flat.sum(dim=0).view(1, 1, -1), per_batch=True),
            "tokens": Ratio(tokens, torch.ones(1), per_batch=True),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        columns: dict[str, dict[SiteLayer, Estimate]] = {"similarity_cosine": {}, "similarity_cka": {}}
        for site_layer in aggregates.site_layers("pairs"):
            total, count = aggregates.bootstrap.sums(aggregates.sums[("pairs", *site_layer)])
            cosine, l2 = (total / count).unbind(dim=1)  # [1+r p]
            heads = (math.isqrt(8 * cosine.shape[-1] + 1) - 1) // 2  # of p pairs, each head with itself included
            folds = aggregates.sums[("moments", *site_layer)].n_used
            cka = recentre(cka_samples(aggregates, site_layer, heads), folds=folds)
            samples = {"cosine": cosine, "l2": l2, "cka": cka}
            for measure, sample in samples.items():
                name = f"{site_layer[0]}/{site_layer[1]}/{measure}"
                report.arrays |= square(interval(sample), heads).columns(name)
            for measure, column in columns.items():
                column[site_layer] = interval(mean_of_others(samples[measure.removeprefix("similarity_")], heads))
        report.columns |= columns
        return report


@analysis
class JensenShannon(Analysis):
    """Mean over queries of the Jensen–Shannon divergence of two heads' weights, in nats (Clark et al. 2019).

    Costs a map of weights a pair of heads, so it runs on request. Special tokens are no queries; whole rows are
    compared.
    """

    name = "similarity.js"
    reads = "rows"
    order = 111
    summary = "Jensen–Shannon divergence between the weights of a layer's heads (costs H² maps)"
    pairs = DIVERGENCE
    default = False

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        row, index = heads.counted_indices  # [n]
        weights = heads.weights.transpose(1, 2).flatten(0, 1).index_select(0, index)  # [n h s]
        n, h, _ = weights.shape
        entropies = torch.special.entr(weights).sum(dim=-1)  # [n h]
        pairs = upload(torch.triu_indices(h, h), weights.device)  # [2 p]
        divergences = weights.new_zeros(n, h, h)
        for i, j in pairs.split(max(1, 2**24 // max(1, weights[:, 0].numel())), dim=1):
            middle = torch.special.entr((weights[:, i] + weights[:, j]) / 2).sum(dim=-1)  # [n p]
            ends = (entropies[:, i] + entropies[:, j]) / 2
            divergences[:, i, j] = divergences[:, j, i] = (middle - ends).clamp(min=0)
        b = len(heads.queries)
        total = weights.new_zeros(b, h, h).index_add_(0, row, divergences)
        return {"js": Ratio(total, heads.queries.sum(dim=-1)[:, None, None])}

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = AnalysisReport()
        for site_layer in aggregates.site_layers("js"):
            report.arrays |= aggregates.ratio("js", *site_layer).columns(f"{site_layer[0]}/{site_layer[1]}/js")
        return report


def pairwise_similarity(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine of c_i and c_j, and ‖c_i − c_j‖, for contexts [n h k]: [n h h] each.

    Both come from dot products. Vectors so near to each other that the difference of squares loses digits (see `NEAR`)
    are subtracted directly; on an accelerator all are, since finding the near ones would synchronise with the host.
    """
    if tokens.device.type != "cpu":
        distances = torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")
        directions = torch.nn.functional.normalize(tokens, dim=-1, eps=1e-12)
        return directions @ directions.transpose(1, 2), distances
    dots = tokens @ tokens.transpose(1, 2)
    squares = dots.diagonal(dim1=1, dim2=2).clone()  # [n h]
    inverse = squares.sqrt().clamp(min=1e-12).reciprocal()
    square_sums = squares[:, :, None] + squares[:, None]
    distances = torch.sub(square_sums, dots, alpha=2)  # negative only by rounding, where it is replaced below
    near = distances <= square_sums.mul_(NEAR)
    near.diagonal(dim1=1, dim2=2).fill_(False)
    if near.any():
        token, i, j = near.nonzero(as_tuple=True)
        distances[near] = (tokens[token, i] - tokens[token, j]).square().sum(dim=-1)
    distances.diagonal(dim1=1, dim2=2).fill_(0)
    return dots.mul_(inverse[:, :, None]).mul_(inverse[:, None]), distances.sqrt_()


def cka_samples(aggregates: Aggregates, site_layer: SiteLayer, heads: int) -> Tensor:
    """CKA of the whole corpus, then of each replicate: [1+r p]."""
    moments, counts = aggregates.sums[("moments", *site_layer)], aggregates.sums[("tokens", *site_layer)]
    while counts.groups > moments.groups:
        counts.halve()
    draws = aggregates.bootstrap.draws(moments.n_used)
    draws = torch.cat([torch.ones(1, moments.n_used, dtype=draws.dtype), draws])  # [1+r f]
    all_folds = slice(0, moments.n_used)
    return cka(moments.total[all_folds], moments.count[all_folds, 0], counts.total[all_folds], draws, heads=heads)


def cka(moments: Tensor, sums: Tensor, tokens: Tensor, draws: Tensor, *, heads: int) -> Tensor:
    """Linear CKA of each pair of heads for every draw of folds: [r p].

    For each of f folds: `moments` [f p k k] of the pairs of heads, `sums` [f h·k] of contexts, and the number of
    `tokens` [f]; `draws` [r f] says how often each fold counts. CKA is ‖X_iᵀX_j‖²_F /
    (‖X_iᵀX_i‖_F ‖X_jᵀX_j‖_F) with X centred on the corpus mean, in every draw (Kornblith et al. 2019, §3). The squared
    norms are quadratic in the draws, so only products between folds are formed, never moments for each draw.
    """
    f, _, k, _ = moments.shape
    first, second = torch.triu_indices(heads, heads)  # [p]
    mean = sums.sum(dim=0) / tokens.sum()  # [d]
    half = (sums - tokens[:, None] * mean / 2).view(f, heads, k)
    mean = mean.expand_as(sums).view(f, heads, k)
    left_factors = torch.stack([half[:, first], mean[:, first]], dim=-1).flatten(0, 1)  # [f·p k 2]
    right = torch.stack([mean[:, second], half[:, second]], dim=-2).flatten(0, 1)  # [f·p 2 k]
    # moments − half·meanᵀ − mean·halfᵀ
    centred_moments = torch.baddbmm(moments.flatten(0, 1), left_factors, right, alpha=-1)
    flat = centred_moments.view(f, -1, k * k).transpose(0, 1)  # [p f k·k]
    products = flat @ flat.transpose(-1, -2)  # [p f f]
    squared_norms = torch.einsum("pra,ra->rp", draws @ products, draws).clamp(min=0)  # [r p]
    diagonal = first == second
    norms = squared_norms[:, diagonal]  # [r h]
    energy, spread = (
        blocks.view(f, -1, k, k)[:, diagonal].sum(dim=0).diagonal(dim1=1, dim2=2).sum(dim=-1)
        for blocks in (moments, centred_moments)
    )
    norms = norms.masked_fill(spread <= CONSTANT * energy, torch.nan)
    return squared_norms / (norms[:, first] * norms[:, second]).sqrt()


def recentre(samples: Tensor, *, folds: int) -> Tensor:
    """Replicates [1+r p] moved so that their mean is the value, the first row, and widened by √(f/(f−1)).

    CKA grows when the sample shrinks, and a resample holds fewer different sentences than the corpus:
    without the shift an interval of replicates can lie beside the value. The factor is the small-sample
    correction of a bootstrap over f units (Efron 1982).
    """
    deviations = samples[1:] - samples[1:].nanmean(dim=0, keepdim=True)
    return torch.cat([samples[:1], (samples[:1] + deviations * (folds / max(1, folds - 1)) ** 0.5).clamp(0, 1)])


def mean_of_others(pairs: Tensor, heads: int) -> Tensor:
    """The mean [r h] of each head's values with the other heads, from values of pairs [r p]; NaN for a single head."""
    first, second = torch.triu_indices(heads, heads)
    full = pairs.new_full((len(pairs), heads, heads), torch.nan)
    full[:, first, second] = full[:, second, first] = pairs
    return full.masked_fill(torch.eye(heads, dtype=torch.bool), torch.nan).nanmean(dim=-1)


def square(pairs: Estimate, heads: int) -> Estimate:
    """Estimates of pairs [p] as symmetric matrices [h h]."""
    first, second = np.triu_indices(heads)
    symmetric = []
    for values in (pairs.value, pairs.low, pairs.high):
        matrix = np.empty((heads, heads))
        matrix[first, second] = matrix[second, first] = values
        symmetric.append(matrix)
    return Estimate(*symmetric)
