"""Scores of every head on the validation text, for swaps that choose heads by them.

- "confidence": mean over queries of the largest weight, special tokens left out on both sides (Voita et al.
  2019, §4; the analysis of that name).
- "uniqueness": mean over sentences of Σ_{j≠i} ‖Z_j − Z_i‖ / (h − 1), contexts Z of a sentence as one vector
  (AvgL2 of Azov & Landau).
- "base", "advanced", "pairwise": the fork's numbers. Largest weight of a sentence; Σ over keys of the largest
  weight that any query gives it, over the number of keys less one; Σ_j of the distance between two heads' maps.
  The last query's weight on the last key is taken as 0, and padding is left out: batches of one are what the fork
  would give (`headscope.engine.fork.confidence`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from headscope.engine.fork import confidence as mhr_confidence
from headscope.heads import Site
from headscope.model.attention import AttentionCall, tapped
from headscope.model.native.transformer import Transformer
from headscope.training.data.batches import TrainingBatch
from headscope.training.swaps.selection import Scores


@dataclass(frozen=True)
class ObservedHeads:
    """One call on one batch: weights [b h t s], context [b h t k], real and counted positions of both sides."""

    weights: Tensor
    context: Tensor
    queries: Tensor
    keys: Tensor
    counted_queries: Tensor
    counted_keys: Tensor


def confidence_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over counted queries of the largest weight on counted keys [h], and their number."""
    peak = heads.weights.masked_fill(~heads.counted_keys[:, None, None], 0.0).amax(dim=-1)  # [b h t]
    counted = (heads.counted_queries & heads.counted_keys.any(dim=-1, keepdim=True)).to(peak.dtype)
    return torch.einsum("bht,bt->h", peak, counted), counted.sum()


def uniqueness(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of the mean distance to the other heads' contexts [h], and the number of sentences."""
    flat = (heads.context * heads.queries[:, None, :, None]).flatten(2)  # [b h t·k]
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").sum(dim=-1)  # [b h]
    return apart.sum(dim=0) / max(flat.shape[1] - 1, 1), _sentences(heads)


def base_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of the largest weight [h]."""
    return mhr_confidence.base(_without_last_cell(heads)).sum(dim=0), _sentences(heads)


def advanced_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of Σ_s max_t weights / (S - 1) [h]; sentences with one key are left out."""
    widths = heads.keys.sum(dim=-1)  # [b]
    values = mhr_confidence.advanced(_without_last_cell(heads), widths)  # [b h]
    return values[widths > 1].sum(dim=0), (widths > 1).sum().to(values.dtype)


def pairwise_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of Σ_j ‖W_i − W_j‖, weights of a sentence as one vector [h]."""
    return mhr_confidence.pairwise(_without_last_cell(heads)).sum(dim=0), _sentences(heads)


SCORES: Mapping[str, Callable[[ObservedHeads], tuple[Tensor, Tensor]]] = {
    "confidence": confidence_score,
    "uniqueness": uniqueness,
    "base": base_score,
    "advanced": advanced_score,
    "pairwise": pairwise_score,
}


def head_scores(
    model: Transformer,
    batches: Iterable[TrainingBatch],
    *,
    score: str,
    source_special: Collection[int] = (),
    target_special: Collection[int] = (),
) -> dict[Site, Scores]:
    """Scores [h] of every layer of every site over `batches`; the ids of special tokens are those of either side."""
    sums: dict[tuple[Site, int], tuple[Tensor, Tensor]] = {}
    site_layers = {id(module): (site, layer) for site, layer, _, module in model.attention_modules()}
    for batch in batches:
        sides = sides_of(batch, source_special, target_special)
        with torch.no_grad(), tapped(partial(_add, sums, site_layers, sides, SCORES[score])):
            memory = None if batch.source is None else model.encode(batch.source, batch.source_mask)
            model.decode(batch.target, memory, memory_mask=batch.source_mask, target_mask=batch.target_mask)
    scores: dict[Site, dict[int, Tensor]] = {}
    for (site, layer), (total, count) in sums.items():
        scores.setdefault(site, {})[layer] = (total / count.clamp_min(1)).cpu()
    return dict(scores)


Sides = Mapping[str, tuple[Tensor, Tensor]]
"""Real and counted positions [b n] of "source" and "target"."""


def _add(
    sums: dict[tuple[Site, int], tuple[Tensor, Tensor]],
    site_layers: Mapping[int, tuple[Site, int]],
    sides: Sides,
    score: Callable[[ObservedHeads], tuple[Tensor, Tensor]],
    call: AttentionCall,
    _: Tensor,
) -> None:
    site, layer = site_layers[id(call.module)]
    total, count = score(observed_heads(call, site, sides, dtype=torch.float64))
    before = sums.get((site, layer))
    sums[site, layer] = (total, count) if before is None else (before[0] + total, before[1] + count)


def observed_heads(call: AttentionCall, site: Site, sides: Sides, *, dtype: torch.dtype | None = None) -> ObservedHeads:
    """A call at a site as scores take it, in `dtype`; None: its own, float32 for half precision."""
    queries = sides["source" if site is Site.ENCODER_SELF else "target"]
    keys = sides["target" if site is Site.DECODER_SELF else "source"]
    dtype = dtype or torch.promote_types(call.weights.dtype, torch.float32)
    weights, context = call.weights.to(dtype), call.context.to(dtype)
    return ObservedHeads(weights, context, queries[0], keys[0], queries[1], keys[1])


def sides_of(batch: TrainingBatch, source_special: Collection[int] = (), target_special: Collection[int] = ()) -> Sides:
    """Real and counted positions of both sides of a batch; the ids given are those that are not counted."""
    sides = {}
    for name, ids, mask, special in (
        ("source", batch.source, batch.source_mask, source_special),
        ("target", batch.target, batch.target_mask, target_special),
    ):
        if ids is not None:
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
            excluded = torch.tensor(sorted(special), dtype=ids.dtype, device=ids.device)
            sides[name] = (real, real & ~torch.isin(ids, excluded))
    return sides


def _without_last_cell(heads: ObservedHeads) -> Tensor:
    return mhr_confidence.without_last_cell(heads.weights, heads.queries, heads.keys)


def _sentences(heads: ObservedHeads) -> Tensor:
    return torch.tensor(float(len(heads.queries)), dtype=heads.weights.dtype, device=heads.weights.device)
