"""Importances of gates from their definitions, one evaluation after the other: any function of gates will do.

A game maps gates [N] (a list of numbers) to what one sentence is worth.
"""

from collections.abc import Callable, Sequence
from itertools import permutations

import numpy as np
import torch
from torch import Tensor

from headscope.heads import HeadId, Layout, all_heads
from headscope.model.attention import AttentionCall, tap_contexts
from headscope.model.discovery import track_calls
from headscope.model.taps import gated

Game = Callable[[Sequence[float]], float]


def ablation(f: Game, size: int) -> list[float]:
    """f(all) − f(all but one)."""
    return [f([1.0] * size) - f([float(other != head) for other in range(size)]) for head in range(size)]


def shapley(f: Game, size: int, orders: Sequence[Sequence[int]] | None = None) -> list[float]:
    """Mean gain by each player, over these orders or over all there are."""
    gains: list[list[float]] = [[] for _ in range(size)]
    for order in orders if orders is not None else list(permutations(range(size))):
        gates = [0.0] * size
        before = f(gates)
        for player in order:
            gates[player] = 1.0
            after = f(gates)
            gains[player].append(after - before)
            before = after
    return [sum(values) / len(values) for values in gains]


def integrated_gradients(f: Game, size: int, *, points: int) -> list[float]:
    """∫ ∂f/∂gate along the diagonal by Gauss and Legendre, slopes by central differences."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    step, gradients = 1e-5, [0.0] * size
    for node, weight in zip((nodes + 1) / 2, weights / 2, strict=True):
        for head in range(size):
            up, down = [float(node)] * size, [float(node)] * size
            up[head] += step
            down[head] -= step
            gradients[head] += weight * (f(up) - f(down)) / (2 * step)
    return gradients


def by_site_layer(gates: Sequence[float], layout: Layout) -> dict[tuple[object, int], Tensor]:
    """Gates of all heads, sorted into those of every (site, layer)."""
    groups: dict[tuple[object, int], list[float]] = {}
    for head, gate in zip(all_heads(layout), gates, strict=True):
        groups.setdefault((head.site, head.layer), []).append(gate)
    return {site_layer: torch.tensor(values, dtype=torch.float64) for site_layer, values in groups.items()}


def under_gates(model: torch.nn.Module, layout: Layout, work: Callable[[], float]) -> Game:
    """The value of `work` as a function of gates on contexts."""

    def game(gates: Sequence[float]) -> float:
        with torch.no_grad(), gated(model, by_site_layer(gates, layout)):  # type: ignore[arg-type]
            return float(work())

    return game


def replace_head(model: torch.nn.Module, head: HeadId, mode: str, shift: int, work: Callable[[], float]) -> float:
    """The value of `work` for one sentence without padding, with a head's context replaced by its mean or shifted."""
    with torch.no_grad(), track_calls(model) as walk:

        def tap(call: AttentionCall, context: Tensor) -> Tensor | None:
            attention_site = walk.attention_site(call.module)
            if attention_site is None or (attention_site.site, attention_site.layer) != (head.site, head.layer):
                return None
            vectors = context[0, head.head]  # [t k]
            new_context = context.clone()
            for position in range(len(vectors)):
                other = vectors[(position + shift) % len(vectors)]
                new_context[0, head.head, position] = vectors.mean(dim=0) if mode == "mean" else other
            return new_context

        with tap_contexts(tap):
            return float(work())
