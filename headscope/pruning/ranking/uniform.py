"""Equal numbers of heads in all layers of a stack: what plain classes and most engines can hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.heads import Site
from headscope.pruning.gate_layout import GateLayout

STACKS = {Site.ENCODER_SELF: "encoder", Site.DECODER_SELF: "decoder", Site.CROSS: "decoder"}
"""Sites whose layers have one number of heads in configs of encoder-decoders."""


@dataclass(frozen=True)
class LayerStack:
    """The gated layers of an encoder or decoder: how many, and how many heads each may keep."""

    name: str
    layers: int
    heads: int
    choices: tuple[int, ...]


def uniform_counts(gating: GateLayout, keep: int) -> Mapping[str, int]:
    """Heads that every layer of each stack keeps where `keep` heads stay in all; shares as equal as they can be.

    ConfigError with the nearest numbers that are possible where `keep` is not.
    """
    stacks = _stacks(gating)
    totals: dict[int, tuple[float, tuple[int, ...]]] = {}
    for counts in product(*(stack.choices for stack in stacks)):
        total = sum(count * stack.layers for count, stack in zip(counts, stacks, strict=True))
        shares = [count / stack.heads for count, stack in zip(counts, stacks, strict=True)]
        totals[total] = min(totals.get(total, (math.inf, counts)), (max(shares) - min(shares), counts))
    if keep not in totals:
        near = [max((n for n in totals if n < keep), default=None), min((n for n in totals if n > keep), default=None)]
        possible = " or ".join(str(total) for total in near if total is not None)
        raise ConfigError(f"--keep {keep} is not as many heads in every layer; keep {possible}")
    return {stack.name: count for stack, count in zip(stacks, totals[keep][1], strict=True)}


def uniform_keep(gating: GateLayout, fraction: float) -> int:
    """Heads that stay in all where every layer keeps the `fraction` of its heads, rounded to whole groups."""
    nearest = ((stack, min(stack.choices, key=lambda n: abs(n - fraction * stack.heads))) for stack in _stacks(gating))
    return sum(count * stack.layers for stack, count in nearest)


def uniform_quotas(gating: GateLayout, keep: int) -> list[tuple[Tensor, int]]:
    """The units of every module [n], and how many of them stay."""
    counts = uniform_counts(gating, keep)
    quotas = []
    for module, (size, protected) in _modules(gating).items():
        members = [number for number, place in enumerate(gating.modules) if place == module]
        if members:  # else all its heads are protected
            quotas.append((torch.tensor(members), (counts[STACKS[module[0]]] - protected) // size))
    return quotas


def _stacks(gating: GateLayout) -> list[LayerStack]:
    """The stacks that have gates."""
    modules, stacks = _modules(gating), []
    for name in dict.fromkeys(STACKS[site] for site, _ in gating.counts):
        counts = [count for (site, _), count in gating.counts.items() if STACKS[site] == name]
        mine = [sizes for (site, _), sizes in modules.items() if STACKS[site] == name]
        choices = tuple(  # whole groups in all modules, and at least the protected heads
            count
            for count in range(1, min(counts) + 1)
            if all(count >= protected and (count - protected) % size == 0 for size, protected in mine)
        )
        if not choices:
            raise ConfigError(
                f"layers of the {name} cannot keep equal numbers of heads: one of them has none, or their groups or "
                "the heads that --protect names leave no number in common"
            )
        stacks.append(LayerStack(name, len(counts), max(counts), choices))
    return stacks


def _modules(gating: GateLayout) -> dict[tuple[Site, int], tuple[int, int]]:
    """Heads of a unit, and protected heads, of a layer of every module that has gates or protected heads."""
    protected = Counter((head.site, head.layer) for head in gating.protected)
    sizes = {
        module: sum((head.site, head.layer) == module for head in unit)
        for module, unit in zip(gating.modules, gating.units, strict=True)
    }
    return {place: (sizes.get(place, 1), protected[place]) for place in [*sizes, *protected]}
