"""How sharp a head is: mean of its largest attention weight (Voita et al. 2019, §4; two MHR variants)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.accumulate import Ratio
from headscope.analysis import Analysis, Heads, analysis


@analysis
class Confidence(Analysis):
    """Mean over queries of max_s weights[b h t s] (Voita et al. 2019, §4), in [0, 1].

    Voita et al. leave the end-of-sentence token out. Here every special token is left out as query and as
    key, and rows are not renormalised; with `keep_special` all tokens count.
    """

    name = "confidence"
    order = 10
    summary = "mean largest attention weight (Voita et al. 2019)"

    def observe(self, heads: Heads) -> Mapping[str, Ratio]:  # noqa: D102
        return {"confidence": heads.over_queries(heads.peak)}

    def signature(self) -> dict[str, str]:  # noqa: D102
        return {"m": "confidence.voita"}


def without_last_cell(heads: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Weights with each sentence's last query × last key zeroed, and the lengths of both sides.

    Padding, which the MHR fork does not mask, is left out: a batch of N gives what N batches of one give.
    """
    real_queries, real_keys = heads.query_side.real, heads.key_side.real
    lengths, widths = real_queries.sum(-1), real_keys.sum(-1)  # [b]
    last_query = torch.arange(real_queries.shape[1], device=lengths.device) == (lengths - 1)[:, None]  # [b t]
    last_key = torch.arange(real_keys.shape[1], device=lengths.device) == (widths - 1)[:, None]  # [b s]
    outside = ~(real_queries[:, :, None] & real_keys[:, None, :]) | (last_query[:, :, None] & last_key[:, None, :])
    return heads.weights.masked_fill(outside[:, None], 0.0), lengths, widths


@analysis
class ConfidenceBase(Analysis):
    """The MHR fork's `base`: mean over sentences of max_{t,s} weights, without the last × last cell.

    Only that one cell is left out; special tokens count. Equals the fork on batches without padding
    (its batches count padding, these do not). Causal self-attention gives 1: the first query sees itself.
    """

    name = "confidence.base"
    order = 11
    summary = "the MHR fork's `base`: mean over sentences of the single largest weight"
    default = False

    def observe(self, heads: Heads) -> Mapping[str, Ratio]:  # noqa: D102
        weights, lengths, _ = without_last_cell(heads)
        return {"confidence_base": Ratio(weights.amax(dim=(-1, -2)), torch.ones_like(lengths)[:, None])}


@analysis
class ConfidenceAdvanced(Analysis):
    """The MHR fork's `advanced`: mean over sentences of Σ_s max_t weights / (S − 1), S keys.

    The maximum is over *queries* for each key; the last × last cell is left out; special tokens count.
    Sentences with a single key are left out (the fork divides by zero there).
    """

    name = "confidence.advanced"
    order = 12
    summary = "the MHR fork's `advanced`: mean over keys of the largest weight any query gives them"
    default = False

    def observe(self, heads: Heads) -> Mapping[str, Ratio]:  # noqa: D102
        weights, _, widths = without_last_cell(heads)
        counted = (widths > 1).to(weights.dtype)  # [b]
        total = weights.amax(dim=-2).sum(dim=-1) / (widths - 1).clamp(min=1)[:, None]  # [b h]
        return {"confidence_advanced": Ratio(total * counted[:, None], counted[:, None])}
