"""Confidence, the mean of a head's largest weight (Voita et al. 2019, §4; three MHR variants), and entropy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.config.declarations import Measure
from headscope.description.examples import MIN_VISIBLE_KEYS
from headscope.engine.base import Aggregates, Analysis, AnalysisReport, HeadBatch, analysis, head_ids
from headscope.engine.mhr_fork import advanced_confidence, base_confidence, map_distances, without_last_cell

LEAST_SURE = "they are the least sure where to look (Voita et al. 2019, §4)"


@analysis
class Confidence(Analysis):
    """Mean over queries of max_s weights[b h t s] (Voita et al. 2019, §4), in [0, 1].

    Special tokens are left out as queries and keys (Voita et al.: the end of the sentence only); rows are not
    renormalised. `sharpness` is Σ max_s weights / Σ 1/n over queries that see n ≥ 5 counted keys: the ratio to even
    weights.
    """

    name = "confidence"
    reads = "rows"
    version = 2
    order = 10
    summary = "mean largest attention weight (Voita et al. 2019)"
    measures = (
        Measure("confidence", "confidence", range=(0, 1), overview=1, keep="highest", why=LEAST_SURE),
        Measure("sharpness", "largest weight over chance", unit="times", range=(0, None)),
    )
    signature_entry = "m:confidence.voita"

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        has_several, chance = heads.shared("chance of several keys", lambda: _several(heads))
        above = heads.over_queries(heads.maximum.weight, only=has_several).total
        return {"confidence": heads.over_queries(heads.maximum.weight), "sharpness": Ratio(above, chance)}


def _several(heads: HeadBatch) -> tuple[Tensor, Tensor]:
    """A mask of queries that see enough keys [b t], and the sum of their largest weights if they were even [b 1]."""
    visible = heads.visible_keys
    has_several = visible >= MIN_VISIBLE_KEYS
    return has_several, (heads.queries & has_several).div(visible.clamp(min=1)).sum(dim=-1, keepdim=True)


def _weights(heads: HeadBatch) -> Iterator[Tensor]:
    """The fork's weights [b h t s], by blocks of queries; one block if the matrix is there."""
    for block in heads.in_blocks():
        yield without_last_cell(block.weights, heads.query_side.real, heads.key_side.real, rows=block.span)


@analysis
class ConfidenceBase(Analysis):
    """The MHR fork's `base`: mean over sentences of max_{t,s} weights, without the last × last cell.

    Special tokens count. Equals the fork on batches without padding. Causal self-attention gives 1.
    """

    name = "confidence.base"
    reads = "contexts"
    order = 11
    summary = "the MHR fork's `base`: mean over sentences of the single largest weight"
    measures = (Measure("confidence_base", "confidence, MHR base", range=(0, 1), keep="highest", why=LEAST_SURE),)
    default = False

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        largest = reduce(torch.maximum, map(base_confidence, _weights(heads)))
        return {"confidence_base": Ratio(largest, largest.new_ones(len(largest), 1))}


@analysis
class ConfidenceAdvanced(Analysis):
    """The MHR fork's `advanced`: mean over sentences of Σ_s max_t weights / (S − 1), S keys.

    The maximum runs over queries; the last × last cell is left out; special tokens count; sentences with one key are
    left out.
    """

    name = "confidence.advanced"
    reads = "contexts"
    order = 12
    summary = "the MHR fork's `advanced`: mean over keys of the largest weight any query gives them"
    measures = (
        Measure("confidence_advanced", "confidence, MHR advanced", range=(0, 1), keep="highest", why=LEAST_SURE),
    )
    default = False

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        widths = heads.key_side.real.sum(dim=-1)  # [b]
        has_several = (widths > 1)[:, None]
        largest = reduce(torch.maximum, (weights.amax(dim=-2) for weights in _weights(heads)))  # [b h s]
        values = advanced_confidence(largest, widths)  # [b h]
        return {"confidence_advanced": Ratio(values.where(has_several, 0.0), has_several.to(values.dtype))}


@analysis
class ConfidencePairwise(Analysis):
    """The MHR fork's `pairwise`: mean over sentences of Σ_j ‖W_i − W_j‖ within a layer.

    W are attention maps without the last × last cell; special tokens count. The sum is not divided by h − 1 (Azov &
    Landau's AvgL2, eq. 6, divides, and is about outputs).
    """

    name = "confidence.pairwise"
    reads = "contexts"
    order = 13
    summary = "the MHR fork's `pairwise`: summed distance of a head's map to those of its layer"
    measures = (
        Measure(
            "confidence_pairwise",
            "distance of maps, MHR pairwise",
            keep="highest",
            why="their maps are most like those of their layer",
        ),
    )
    default = False

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        distances = reduce(torch.hypot, map(map_distances, _weights(heads)))  # [b h h]: of the queries so far
        return {"confidence_pairwise": Ratio(distances.sum(dim=-1), distances.new_ones(len(distances), 1))}


EVEN = 1e-6  # a head weighs all keys alike if its entropy is this near to the maximum, as a share of it


@analysis
class Entropy(Analysis):
    """Mean over queries of −Σ_s w ln w in nats (Ghader & Monz 2017), and of that over ln(visible keys).

    Special tokens are no queries; sums run over all visible keys. Queries that see one key count for `entropy` only.
    Heads that weigh all keys alike are named in a remark: their argmax is that of the first key.
    """

    name = "entropy"
    reads = "rows"
    order = 20
    summary = "entropy of the attention weights, in nats and as a share of the maximum"
    measures = (
        Measure(
            "entropy", "entropy", unit="nats", range=(0, None), keep="lowest", why="they spread their attention most"
        ),
        Measure("entropy_share", "entropy / its maximum", range=(0, 1), overview=3),
    )

    def observe(self, heads: HeadBatch) -> Mapping[str, Ratio]:
        entropy = heads.entropy
        largest, has_several = heads.shared("largest entropy", lambda: _largest(heads))
        return {
            "entropy": heads.over_queries(entropy),
            "entropy_share": heads.over_queries(entropy / largest, only=has_several),
        }

    def report(self, aggregates: Aggregates) -> AnalysisReport:
        report = super().report(aggregates)
        shares = report.columns["entropy_share"]
        even = [
            str(head)
            for site_layer, share in shares.items()
            for head in head_ids(site_layer, len(share.value))
            if share.value[head.head] > 1 - EVEN
        ]
        if even:
            examples = ", ".join(even[:4]) + (" …" if len(even) > 4 else "")
            report.remarks.append(
                f"entropy: {len(even)} heads weigh all keys alike ({examples}), so that they point nowhere: distance, "
                "offset and other measures of their largest weight are those of the first key"
            )
        return report


def _largest(heads: HeadBatch) -> tuple[Tensor, Tensor]:
    """The largest possible entropy of each query's weights [b 1 t], and a mask of queries with several keys [b t]."""
    visible_keys = heads.visible_on(heads.context.new_ones(*heads.keys.shape, 1))[..., 0]
    return visible_keys.clamp(min=2).log()[:, None], visible_keys > 1
