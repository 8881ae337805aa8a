"""The confidences of the MHR fork (`--head-confidence-method`): a number per sentence and head, from weights.

Weights [b h t s] are those after the softmax, before dropout and mixing, zero at padding. In all three numbers
the weight of a sentence's last query on its last key is taken as 0: `without_last_cell` comes first.
"""

from __future__ import annotations

import torch
from torch import Tensor


def without_last_cell(weights: Tensor, queries: Tensor, keys: Tensor, *, rows: slice = slice(None)) -> Tensor:
    """Weights [b h t s] of real queries [b t] on real keys [b s], the last of them on the last set to 0.

    The fork zeroes the last cell of the padded batch and masks no padding; with padding left out, a batch of N
    gives what N batches of one give there. Padding may stand on either side. `rows` are the queries whose weights
    these are, where they are not all.
    """
    last = _last(queries)[:, rows, None] & _last(keys)[:, None, :]
    outside = ~(queries[:, rows, None] & keys[:, None, :]) | last  # [b t s]
    return weights.masked_fill(outside[:, None], 0.0)


def base(weights: Tensor) -> Tensor:
    """max_{t,s} weights [b h]; 1 under a causal mask, where the first query sees itself alone."""
    return weights.amax(dim=(-1, -2))


def advanced(weights: Tensor, widths: Tensor) -> Tensor:
    """Σ_s max_t weights / (S − 1) [b h], S the number of keys `widths` [b]; no finite number for a single key."""
    return mean_of_keys(weights.amax(dim=-2), widths)


def mean_of_keys(largest: Tensor, widths: Tensor) -> Tensor:
    """`advanced` from the largest weight that any query gives to each key, [b h s]."""
    return largest.sum(dim=-1) / (widths - 1)[:, None]


def pairwise(weights: Tensor) -> Tensor:
    """Σ_j ‖W_i − W_j‖ [b h], the weights of a head in a sentence as one vector (t · s long), not divided by h − 1."""
    return map_distances(weights).sum(dim=-1)


def map_distances(weights: Tensor) -> Tensor:
    """‖W_i − W_j‖ [b h h] of the maps W [t s] of all heads."""
    flat = weights.flatten(2)  # [b h t·s]
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")


def _last(real: Tensor) -> Tensor:
    """Where the last real position of each sentence is [b n]."""
    positions = torch.arange(real.shape[1], device=real.device)
    return positions == (real * (positions + 1)).argmax(dim=1, keepdim=True)
