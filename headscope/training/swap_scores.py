"""Swaps that scores decide about: when one happens, stays and is undone, and which heads it takes (MHR, dynamic).

Scores are a number for every head of a site, small for the weak ones. The rules of `decide` are the fork's; of
the ways to choose heads, "hard" and "random" are the same in the fork and the paper, "soft" and "local" are not.

The scores, on the validation text:
- "confidence": mean over queries of the largest weight, special tokens left out on both sides (Voita et al.
  2019, §4; the analysis of that name).
- "uniqueness": mean over sentences of Σ_{j≠i} ‖Z_j − Z_i‖ / (h − 1), contexts Z of a sentence as one vector
  (AvgL2 of Azov & Landau).
- "base", "advanced", "pairwise": the fork's numbers. Largest weight of a sentence; Σ over keys of the largest
  weight that any query gives it, over the number of keys less one; Σ_j of the distance between two heads' maps.
  The last query's weight on the last key is taken as 0, and padding is left out: batches of one are what the fork
  would give (`headscope.engine.mhr_fork`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headscope.data.encoded import Batch, Side
from headscope.engine import mhr_fork
from headscope.errors import ConfigError
from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import HeadId, Site
from headscope.model.attention import AttentionCall, precise_type, tap_contexts
from headscope.model.native.transformer import Transformer
from headscope.training.swaps import Swap

Scores = Mapping[int, Tensor]
"""Scores [h] of the heads of each layer of one site."""
Action = Literal["swap", "undo", "nothing"]
FORK_HEADS, FORK_LAYERS = 4, 3  # what the fork has in the place of options


@dataclass(frozen=True)
class SwapTiming:
    """Epochs: the first that may begin swapped, the last (None: all), how long a swap stays, and the rest after it."""

    start: int
    end: int | None
    frequency: int
    rest: int = 1


@dataclass(frozen=True)
class Phase:
    """Where dynamic swapping stands at one site: the swaps that are to be undone, and when they were made."""

    pending: tuple[Swap, ...] = ()
    last: int = 0


def decide(phase: Phase, coming: int, timing: SwapTiming) -> tuple[Action, Phase]:
    """What happens between two epochs, and the phase after it; for "swap" the caller fills in `pending`.

    `coming` is the epoch that is about to begin, 2 at the first decision. In order: before the start nothing;
    after the end undo; a swap that stayed `frequency` epochs is undone; `frequency` + `rest` epochs after a
    swap, or at the start, comes a new one.
    """
    if coming < timing.start:
        return "nothing", Phase()
    stays = coming - phase.last
    has_ended = timing.end is not None and coming > timing.end
    if phase.pending and (has_ended or stays == timing.frequency):
        return "undo", Phase((), phase.last)
    if not has_ended and (stays == timing.frequency + timing.rest or coming == timing.start):
        return "swap", Phase((), coming)
    return "nothing", Phase((), phase.last) if has_ended else phase


@dataclass(frozen=True)
class SwapScores:
    """What a way of choosing heads sees; `depth` is the encoder's number of layers, which the fork takes for all."""

    site: Site
    scores: Scores
    max_switches: int
    generator: torch.Generator
    depth: int = 0

    @property
    def layers(self) -> list[int]:
        """Layers that have heads, in order."""
        return [layer for layer, scores in sorted(self.scores.items()) if len(scores)]

    def ranked(self, layer: int) -> list[HeadId]:
        """Heads of a layer, the weakest first; equal scores in the order of heads."""
        order = torch.argsort(self.scores[layer], stable=True).tolist()
        return [HeadId(self.site, layer, head) for head in order]

    def all_ranked(self) -> list[HeadId]:
        """Heads of all layers, the weakest first."""
        heads = [head for layer in self.layers for head in self.ranked(layer)]
        return sorted(heads, key=lambda head: float(self.scores[head.layer][head.head]))


def hard(swap_scores: SwapScores) -> list[Swap]:
    """The k strongest heads of the site with its k weakest: the strongest with the weakest, and so on."""
    return _ends(swap_scores.all_ranked(), swap_scores.max_switches, f"{swap_scores.site}")


def at_random(swap_scores: SwapScores) -> list[Swap]:
    """2k heads of the site in any order: the control of "hard"."""
    heads = swap_scores.all_ranked()
    order = torch.randperm(len(heads), generator=swap_scores.generator).tolist()
    return _ends([heads[index] for index in order], swap_scores.max_switches, f"{swap_scores.site}")


def soft(swap_scores: SwapScores) -> list[Swap]:
    """The k weakest heads of a layer with the k weakest of the layer that mirrors it, weakest with weakest (paper)."""
    layers = swap_scores.layers
    swaps = []
    for low, high in zip(layers[: len(layers) // 2], reversed(layers), strict=False):
        pair = swap_scores.ranked(low), swap_scores.ranked(high)
        _check_k(swap_scores.max_switches, min(map(len, pair)), f"{swap_scores.site}, layers {low} and {high}")
        swaps += [
            Swap(*heads)
            for heads in zip(pair[0][: swap_scores.max_switches], pair[1][: swap_scores.max_switches], strict=True)
        ]
    return swaps


def local(swap_scores: SwapScores) -> list[Swap]:
    """The k strongest heads of every layer with its own k weakest."""
    return [
        swap
        for n in swap_scores.layers
        for swap in _ends(swap_scores.ranked(n), swap_scores.max_switches, f"{swap_scores.site}.{n}")
    ]


def fork_soft(swap_scores: SwapScores) -> list[Swap]:
    """The fork's "soft": its four weakest heads of each of the first k layers, by number, with the mirror layer."""
    layers = swap_scores.depth
    if swap_scores.max_switches > layers - swap_scores.max_switches:
        raise ConfigError(
            f"{swap_scores.max_switches} switches of {layers} layers; the fork's soft swaps take at most half of them"
        )
    return _swap_mirrored(swap_scores, range(swap_scores.max_switches), FORK_HEADS)


def fork_local(swap_scores: SwapScores) -> list[Swap]:
    """The fork's "local", which is not: its k weakest heads of each of the first three layers, as in `fork_soft`."""
    heads = len(swap_scores.scores[0])
    if swap_scores.max_switches > heads - swap_scores.max_switches:
        raise ConfigError(
            f"{swap_scores.max_switches} switches of {heads} heads; the fork's local swaps take at most half of them"
        )
    return _swap_mirrored(swap_scores, range(FORK_LAYERS), swap_scores.max_switches)


def _swap_mirrored(swap_scores: SwapScores, layers: range, heads: int) -> list[Swap]:
    last = swap_scores.depth - 1
    if missing := [n for n in layers if n not in swap_scores.scores]:
        raise ConfigError(
            f"the fork's way takes layer {missing[0]}; {swap_scores.site} has {len(swap_scores.scores)} layers"
        )
    pairs = [(head, last - head.layer) for n in layers for head in swap_scores.ranked(n)[:heads]]
    return [Swap(head, HeadId(head.site, mirror, head.head)) for head, mirror in pairs if mirror != head.layer]


def _ends(heads_by_score: list[HeadId], k: int, location: str) -> list[Swap]:
    _check_k(2 * k, len(heads_by_score), location)
    return [
        Swap(strong, weak)
        for strong, weak in zip(heads_by_score[len(heads_by_score) - k :], reversed(heads_by_score[:k]), strict=True)
    ]


def _check_k(n_needed: int, heads: int, location: str) -> None:
    if n_needed > heads:
        raise ConfigError(
            f"swaps of {location} need {n_needed} heads, and there are {heads}; lower --dynamic-max-switches"
        )


SELECTIONS: Mapping[str, Callable[[SwapScores], list[Swap]]] = {
    "hard": hard,
    "soft": soft,
    "random": at_random,
    "local": local,
}
FORK_SELECTIONS = {**SELECTIONS, "soft": fork_soft, "local": fork_local}


@dataclass(frozen=True)
class ObservedHeads:
    """One call on one batch: weights [b h t s], context [b h t k], and the sides of its queries and keys."""

    weights: Tensor
    context: Tensor
    queries: Side
    keys: Side

    @classmethod
    def of(cls, call: AttentionCall, sides: tuple[Side, Side], *, dtype: torch.dtype | None = None) -> ObservedHeads:
        """A call in `dtype`; None: its own, float32 for half precision."""
        dtype = dtype or precise_type(call.weights.dtype)
        return cls(call.weights.to(dtype), call.context.to(dtype), *sides)


def confidence_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over counted queries of the largest weight on counted keys [h], and their number."""
    keys, queries = (side.real & ~side.special for side in (heads.keys, heads.queries))
    peak = heads.weights.masked_fill(~keys[:, None, None], 0.0).amax(dim=-1)  # [b h t]
    is_counted = (queries & keys.any(dim=-1, keepdim=True)).to(peak.dtype)
    return torch.einsum("bht,bt->h", peak, is_counted), is_counted.sum()


def uniqueness(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of the mean distance to the other heads' contexts [h], and the number of sentences."""
    flat = (heads.context * heads.queries.real[:, None, :, None]).flatten(2)  # [b h t·k]
    apart = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").sum(dim=-1)  # [b h]
    total, count = _sum_counts(apart)
    return total / max(flat.shape[1] - 1, 1), count


def advanced_score(heads: ObservedHeads) -> tuple[Tensor, Tensor]:
    """Sum over sentences of Σ_s max_t weights / (S - 1) [h]; sentences with one key are left out."""
    widths = heads.keys.real.sum(dim=-1)  # [b]
    return _sum_counts(mhr_fork.advance_share(_without_last_cell(heads), widths)[widths > 1])


SCORES: Mapping[str, Callable[[ObservedHeads], tuple[Tensor, Tensor]]] = {
    "confidence": confidence_score,
    "uniqueness": uniqueness,
    "base": lambda heads: _sum_counts(mhr_fork.base(_without_last_cell(heads))),
    "advanced": advanced_score,
    "pairwise": lambda heads: _sum_counts(mhr_fork.pairwise(_without_last_cell(heads))),
}


def head_scores(model: Transformer, batches: Iterable[Batch], *, score: str) -> dict[Site, Scores]:
    """Scores [h] of every layer of every site over `batches`."""
    sums: dict[tuple[Site, int], tuple[Tensor, Tensor]] = {}
    site_layers = {id(module): (site, layer) for site, layer, _, module in model.attention_modules()}

    def add(batch: Batch, call: AttentionCall, _: Tensor) -> None:
        site_layer = site_layers[id(call.module)]
        heads = ObservedHeads.of(call, batch.sides(site_layer[0]), dtype=torch.float64)
        total, count = SCORES[score](heads)
        before = sums.get(site_layer)
        sums[site_layer] = (total, count) if before is None else (before[0] + total, before[1] + count)

    for batch in batches:
        with torch.no_grad(), tap_contexts(partial(add, batch)):
            final_states(model, batch)
    scores: dict[Site, dict[int, Tensor]] = {}
    for (site, layer), (total, count) in sums.items():
        scores.setdefault(site, {})[layer] = (total / count.clamp_min(1)).cpu()
    return dict(scores)


def _without_last_cell(heads: ObservedHeads) -> Tensor:
    return mhr_fork.without_last_cell(heads.weights, heads.queries.real, heads.keys.real)


def _sum_counts(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of values [b h] over sentences, and how many these are."""
    return values.sum(dim=0), values.new_tensor(float(len(values)))
