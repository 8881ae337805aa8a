"""Swaps that scores decide about: when one happens, stays and is undone, and which heads it takes (MHR, dynamic).

Scores are a number for every head of a site, small for the weak ones. The rules of `decide` are the fork's; of
the ways to choose heads, "hard" and "random" are the same in the fork and the paper, "soft" and "local" are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.heads import HeadId, Site
from headscope.training.swaps.swaps import Swap

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
    ended = timing.end is not None and coming > timing.end
    if phase.pending and (ended or stays == timing.frequency):
        return "undo", Phase((), phase.last)
    if not ended and (stays == timing.frequency + timing.rest or coming == timing.start):
        return "swap", Phase((), coming)
    return "nothing", Phase((), phase.last) if ended else phase


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


def hard(scored: SwapScores) -> list[Swap]:
    """The k strongest heads of the site with its k weakest: the strongest with the weakest, and so on."""
    return _ends(scored.all_ranked(), scored.max_switches, f"{scored.site}")


def at_random(scored: SwapScores) -> list[Swap]:
    """2k heads of the site in any order: the control of "hard"."""
    heads = scored.all_ranked()
    order = torch.randperm(len(heads), generator=scored.generator).tolist()
    return _ends([heads[index] for index in order], scored.max_switches, f"{scored.site}")


def soft(scored: SwapScores) -> list[Swap]:
    """The k weakest heads of a layer with the k weakest of the layer that mirrors it, weakest with weakest (paper)."""
    layers = scored.layers
    swaps = []
    for low, high in zip(layers[: len(layers) // 2], reversed(layers), strict=False):
        pair = scored.ranked(low), scored.ranked(high)
        _check_k(scored.max_switches, min(map(len, pair)), f"{scored.site}, layers {low} and {high}")
        swaps += [
            Swap(*heads) for heads in zip(pair[0][: scored.max_switches], pair[1][: scored.max_switches], strict=True)
        ]
    return swaps


def local(scored: SwapScores) -> list[Swap]:
    """The k strongest heads of every layer with its own k weakest."""
    return [swap for n in scored.layers for swap in _ends(scored.ranked(n), scored.max_switches, f"{scored.site}.{n}")]


def fork_soft(scored: SwapScores) -> list[Swap]:
    """The fork's "soft": its four weakest heads of each of the first k layers, by number, with the mirror layer."""
    layers = scored.depth
    if scored.max_switches > layers - scored.max_switches:
        raise ConfigError(
            f"{scored.max_switches} switches of {layers} layers; the fork's soft swaps take at most half of them"
        )
    return _mirrored(scored, range(scored.max_switches), FORK_HEADS)


def fork_local(scored: SwapScores) -> list[Swap]:
    """The fork's "local", which is not: its k weakest heads of each of the first three layers, as in `fork_soft`."""
    heads = len(scored.scores[0])
    if scored.max_switches > heads - scored.max_switches:
        raise ConfigError(
            f"{scored.max_switches} switches of {heads} heads; the fork's local swaps take at most half of them"
        )
    return _mirrored(scored, range(FORK_LAYERS), scored.max_switches)


def _mirrored(scored: SwapScores, layers: range, heads: int) -> list[Swap]:
    last = scored.depth - 1
    if missing := [n for n in layers if n not in scored.scores]:
        raise ConfigError(f"the fork's way takes layer {missing[0]}; {scored.site} has {len(scored.scores)} layers")
    pairs = [(head, last - head.layer) for n in layers for head in scored.ranked(n)[:heads]]
    return [Swap(head, HeadId(head.site, mirror, head.head)) for head, mirror in pairs if mirror != head.layer]


def _ends(ranked: list[HeadId], k: int, location: str) -> list[Swap]:
    _check_k(2 * k, len(ranked), location)
    return [Swap(strong, weak) for strong, weak in zip(ranked[len(ranked) - k :], ranked[k - 1 :: -1], strict=True)]


def _check_k(needed: int, heads: int, location: str) -> None:
    if needed > heads:
        raise ConfigError(
            f"swaps of {location} need {needed} heads, and there are {heads}; lower --dynamic-max-switches"
        )


SELECTIONS: Mapping[str, Callable[[SwapScores], list[Swap]]] = {
    "hard": hard,
    "soft": soft,
    "random": at_random,
    "local": local,
}
FORK_SELECTIONS = {**SELECTIONS, "soft": fork_soft, "local": fork_local}
