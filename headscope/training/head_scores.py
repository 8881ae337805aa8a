"""Scores of heads in training: which heads to swap when, and the MHR fork's files of confidence on training batches.

A score is small for a weak head. `decide` follows the MHR fork (the program of Azov & Landau); the selections "hard"
and "random" are the same in fork and paper, "soft" and "local" are not. Scores are computed on the validation text:
the analyses `confidence` and `confidence.base`, `.advanced`, `.pairwise`, or "uniqueness", the mean over sentences of
Σ_{j≠i} ‖Z_j − Z_i‖ / (h − 1), with all contexts of a sentence as one vector Z_i of head i (AvgL2 of Azov & Landau).

Files of confidence, DIR/confs/epoch-N.pkl, are {"encoder": [{"self_attn": X}, …], "decoder": [{"self_attn": X,
"enc_attn": X}, …]}, X float64 [n h+1]: a row for each of the n micro-batches, the scores of the h heads (means over
sentences) and the number of sentences. As in the fork they are computed in the forward passes of training, from weights
before dropout and before any mixing of heads.

Deviations: padding does not count, so a row is the mean of the fork's scores of single sentences (the fork counts
padded queries, and divides by the padded length); every micro-batch of every process has a row (the fork keeps the last
one of an update, of the first process); if an update passes its batches several times (MAE), the last pass counts; the
fork calls the folder `confs/NAME-method=base`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from headscope.bootstrap import Ratio
from headscope.data.encoded import Batch
from headscope.engine.base import ANALYSES, RunOptions
from headscope.engine.heads.head_batch import HeadBatch, ObservedBatch
from headscope.errors import ConfigError, flag
from headscope.files.tables import write_pickle
from headscope.formats.transformer_checkpoint import final_states
from headscope.heads import HeadId, Site, SiteLayer
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.discovery import AttentionSite
from headscope.model.native.transformer import Transformer
from headscope.model.taps import observing
from headscope.results.study_files import nest
from headscope.training.checkpoints import CONFIDENCE
from headscope.training.config import TrainingPosition
from headscope.training.swaps import Swap
from headscope.training.variant import Gradients, Variant, VariantChain

if TYPE_CHECKING:
    from headscope.training.losses import Sums
    from headscope.training.run_state import TrainingRun


Scores = Mapping[int, Tensor]
"""Scores [h] of the heads of each layer of one site."""
Action = Literal["swap", "undo", "nothing"]
FORK_HEADS, FORK_LAYERS = 4, 3  # numbers that are constants in the fork


@dataclass(frozen=True)
class SwapTiming:
    """When to swap, in epochs: `start` is the first that begins with a swap, `end` the last (None: no end).

    A swap lasts `frequency` epochs, and `pause` epochs lie between two swaps.
    """

    start: int
    end: int | None
    frequency: int
    pause: int = 1


@dataclass(frozen=True)
class Phase:
    """The state of dynamic swapping at one site: swaps to undo, the epoch of the `last` one, and the number so far."""

    pending: tuple[Swap, ...] = ()
    last: int = 0
    n_swapped: int = 0


def decide(phase: Phase, epoch: int, timing: SwapTiming) -> tuple[Action, Phase]:
    """The action between two epochs, and the phase after it; for "swap" the caller fills in `pending`.

    `epoch` is the one about to begin, 2 at the first decision. Nothing happens before the start. A swap is undone after
    `frequency` epochs, or after the end. A new one is made at the start, and `frequency` + `pause` epochs after a swap.
    """
    if epoch < timing.start:
        return "nothing", Phase(n_swapped=phase.n_swapped)
    since_swap = epoch - phase.last
    has_ended = timing.end is not None and epoch > timing.end
    if phase.pending and (has_ended or since_swap == timing.frequency):
        return "undo", replace(phase, pending=())
    if not has_ended and (since_swap == timing.frequency + timing.pause or epoch == timing.start):
        return "swap", replace(phase, pending=(), last=epoch)
    return "nothing", replace(phase, pending=()) if has_ended else phase


@dataclass(frozen=True)
class SwapScores:
    """The inputs of a selection of heads; `depth` is the encoder's number of layers, the fork's for all sites."""

    site: Site
    scores: Scores
    max_switches: int
    generator: torch.Generator
    depth: int = 0

    @property
    def layers(self) -> list[int]:
        """Layers that have heads, in order."""
        return [layer for layer, scores in sorted(self.scores.items()) if len(scores)]

    def rank_heads(self, layer: int) -> list[HeadId]:
        """Heads of a layer, the weakest first; equal scores in the order of heads."""
        order = torch.argsort(self.scores[layer], stable=True).tolist()
        return [HeadId(self.site, layer, head) for head in order]

    def all_ranked(self) -> list[HeadId]:
        """Heads of all layers, the weakest first."""
        heads = [head for layer in self.layers for head in self.rank_heads(layer)]
        return sorted(heads, key=lambda head: float(self.scores[head.layer][head.head]))


def hard(swap_scores: SwapScores) -> list[Swap]:
    """Swap the k strongest heads of the site with its k weakest: the strongest with the weakest, and so on."""
    return _swap_ends(swap_scores.all_ranked(), swap_scores.max_switches, f"{swap_scores.site}")


def at_random(swap_scores: SwapScores) -> list[Swap]:
    """Swap 2k random heads of the site: the control of "hard"."""
    heads = swap_scores.all_ranked()
    order = torch.randperm(len(heads), generator=swap_scores.generator).tolist()
    return _swap_ends([heads[index] for index in order], swap_scores.max_switches, f"{swap_scores.site}")


def soft(swap_scores: SwapScores) -> list[Swap]:
    """Swap the k weakest heads of each layer with the k weakest of its mirror layer, weakest with weakest (paper)."""
    layers, k, swaps = swap_scores.layers, swap_scores.max_switches, list[Swap]()
    for low, high in zip(layers[: len(layers) // 2], reversed(layers), strict=False):
        pair = swap_scores.rank_heads(low), swap_scores.rank_heads(high)
        _check_k(k, min(map(len, pair)), f"{swap_scores.site}, layers {low} and {high}")
        swaps += map(Swap, pair[0][:k], pair[1][:k])
    return swaps


def local(swap_scores: SwapScores) -> list[Swap]:
    """Swap the k strongest heads of every layer with its own k weakest."""
    return [
        swap
        for n in swap_scores.layers
        for swap in _swap_ends(swap_scores.rank_heads(n), swap_scores.max_switches, f"{swap_scores.site}.{n}")
    ]


def fork_soft(swap_scores: SwapScores) -> list[Swap]:
    """The fork's "soft": swap the four weakest heads of each of the first k layers with the same ones of its mirror."""
    _check_k(2 * swap_scores.max_switches, swap_scores.depth, "the fork's soft way", "layers")
    return _swap_mirrored(swap_scores, range(swap_scores.max_switches), FORK_HEADS)


def fork_local(swap_scores: SwapScores) -> list[Swap]:
    """The fork's "local", which is not local: as `fork_soft`, of the k weakest heads of the first three layers."""
    swaps = _swap_mirrored(swap_scores, range(FORK_LAYERS), swap_scores.max_switches)
    _check_k(2 * swap_scores.max_switches, len(swap_scores.scores[0]), "the fork's local way")
    return swaps


def _swap_mirrored(swap_scores: SwapScores, layers: range, heads: int) -> list[Swap]:
    """Swap the weakest heads of `layers` with the heads of the same number in their mirror layers."""
    last = swap_scores.depth - 1
    if missing := [n for n in layers if n not in swap_scores.scores]:
        raise ConfigError(
            f"the fork's way swaps heads of layer {missing[0]}; {swap_scores.site} has {len(swap_scores.scores)} layers"
        )
    pairs = [(head, last - head.layer) for n in layers for head in swap_scores.rank_heads(n)[:heads]]
    return [Swap(head, HeadId(head.site, mirror, head.head)) for head, mirror in pairs if mirror != head.layer]


def _swap_ends(heads_by_score: list[HeadId], k: int, location: str) -> list[Swap]:
    """Swap the last k heads with the first k, from the ends inwards."""
    _check_k(2 * k, len(heads_by_score), location)
    return [*map(Swap, heads_by_score[len(heads_by_score) - k :], reversed(heads_by_score[:k]))]


def _check_k(n_needed: int, count: int, location: str, unit: str = "heads") -> None:
    if n_needed > count:
        raise ConfigError(
            f"swaps of {location} need {n_needed} {unit}, and there are {count}; lower {flag.dynamic_max_switches}"
        )


Selection = Callable[[SwapScores], list[Swap]]
SELECTIONS: Mapping[str, Selection] = {"hard": hard, "soft": soft, "random": at_random, "local": local}
FORK_SELECTIONS = {**SELECTIONS, "soft": fork_soft, "local": fork_local}


Score = Callable[[HeadBatch], Ratio]
"""A score of heads, as sums [b h] over the sentences of a batch and their counts."""


def score_of(name: str) -> Score:
    """The score of that name: uniqueness, or a confidence analysis."""
    if name == "uniqueness":
        return uniqueness
    name = name if name == "confidence" else f"confidence.{name}"
    observer = ANALYSES.get(name)(RunOptions())
    return lambda heads: observer.observe(heads)[name.replace(".", "_")]


def uniqueness(heads: HeadBatch) -> Ratio:
    """Mean over sentences of the mean distance between a head's contexts and the other heads'."""
    flat = (heads.context * heads.query_side.real[:, None, :, None]).flatten(2)  # [b h t·k]
    distance = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist").sum(dim=-1)  # [b h]
    return Ratio(distance / max(flat.shape[1] - 1, 1), distance.new_ones(len(distance), 1))


def head_scores(model: Transformer, batches: Iterable[Batch], *, score: str) -> Mapping[Site, Scores]:
    """Scores [h] of every layer of every site over `batches`."""
    scores: dict[Site, dict[int, Tensor]] = {}
    sums: dict[SiteLayer, Tensor] = {}  # [2 h]: totals and counts
    measure = score_of(score)
    for batch in batches:
        view = ObservedBatch(batch)

        def add(attention_site: AttentionSite, call: AttentionCall, view: ObservedBatch = view) -> None:
            ratio = measure(view.heads(attention_site, call))
            parts = torch.broadcast_tensors(*(part.double().sum(dim=0).cpu() for part in (ratio.total, ratio.count)))
            sums[attention_site.site_layer] = sums.get(attention_site.site_layer, 0) + torch.stack(parts)

        with torch.no_grad(), observing(model, add):
            final_states(model, batch)
    for (site, layer), (total, count) in sums.items():
        scores.setdefault(site, {})[layer] = total / count.clamp_min(1)
    return scores


class ConfidenceFiles(Variant):
    """Watches training by a variant's hooks, without changing it, and writes a file of confidence after every epoch.

    `rows` of an unfinished epoch are part of the state.
    """

    name = "confidence-files"
    summary = "Confidence of heads on the training batches of every epoch."
    state = ("rows", "logged_rows")

    def __init__(self, method: str) -> None:
        super().__init__(None)
        self.method, self.score = method, score_of(method)
        self.sites: dict[int, AttentionSite] = {}
        self.heads: dict[SiteLayer, int] = {}
        self.calls: list[AttentionCall] = []
        self.passes: list[Tensor] = []
        self.rows: list[Tensor] = []
        self.logged_rows = 0

    def prepare(self, run: TrainingRun) -> None:
        calls = run.model.declared_attention().calls
        self.sites = {key: attention_site for key, (attention_site,) in calls.items() if attention_site.heads}
        self.heads = {attention_site.site_layer: attention_site.heads for attention_site in self.sites.values()}

    def step(self, run: TrainingRun, batches: Sequence[Batch], gradients: Gradients) -> Sums:
        self.calls, self.passes = [], []
        with tap_contexts(self._record_call, before_mixing=True):
            sums = gradients(batches)
        passes = zip(self.passes[-len(batches) :], batches, strict=True)
        rows = [row.cpu() for row, batch in passes if len(batch.indices)]
        self.rows += [row for process_rows in run.processes.all(rows) for row in process_rows]
        return sums

    def _record_call(self, call: AttentionCall, _: Tensor) -> None:
        if id(call.module) in self.sites:
            self.calls.append(call)

    @torch.no_grad()
    def extra_loss(self, run: TrainingRun, batch: Batch) -> None:
        """Turn the recorded calls of the last forward pass into a row; there is no loss."""
        calls, self.calls, view = self.calls, [], ObservedBatch(batch)
        scores: dict[SiteLayer, Tensor] = {}
        for call in calls:
            attention_site = self.sites[id(call.module)]
            ratio = self.score(view.heads(attention_site, call))
            total, count = (part.sum(dim=0) for part in (ratio.total, ratio.count))
            scores[attention_site.site_layer] = torch.cat([total / count.clamp_min(1), count])
        self.passes.append(torch.cat([scores[site_layer] for site_layer in self.heads]))

    def after_epoch(self, run: TrainingRun, position: TrainingPosition) -> None:
        rows = self._by_site_layer(self.rows)
        self.rows, self.logged_rows = [], 0
        if run.processes.main:
            arrays = {site_layer: values.numpy().astype("float64") for site_layer, values in rows.items()}
            write_pickle(run.config.out / CONFIDENCE / f"epoch-{position.epoch}.pkl", nest(arrays))

    def history(self, run: TrainingRun) -> dict[str, float]:
        """The mean over the heads of each site and over this epoch's sentences since the previous line."""
        means = dict.fromkeys(sorted({site for site, _ in self.heads}), float("nan"))
        if recent := self.rows[self.logged_rows :]:
            rows = self._by_site_layer(recent)
            for site in means:
                parts = [(part[:, :-1], part[:, -1:]) for (own, _), part in rows.items() if own is site]
                count = sum(float(sizes.sum()) * scores.shape[1] for scores, sizes in parts)
                means[site] = sum(float((scores * sizes).sum()) for scores, sizes in parts) / max(count, 1)
        self.logged_rows = len(self.rows)
        return {f"confidence_{self.method}.{site}": value for site, value in means.items()}

    def _by_site_layer(self, rows: Sequence[Tensor]) -> dict[SiteLayer, Tensor]:
        """Rows [n h+1] of every (site, layer), without those of no sentence."""
        sizes = [count + 1 for count in self.heads.values()]
        table = torch.stack([row.double() for row in rows]) if rows else torch.zeros(0, sum(sizes))
        parts = zip(self.heads, torch.split_with_sizes(table, sizes, dim=1), strict=True)
        return {site_layer: part[part[:, -1] > 0] for site_layer, part in parts}


def with_confidence(variant: Variant, method: str) -> Variant:
    """The variant, watched by `ConfidenceFiles`; it keeps its name."""
    chain = VariantChain([ConfidenceFiles(method), variant], options=variant.options)
    chain.name = variant.name  # type: ignore[misc]
    return chain
