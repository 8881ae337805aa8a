"""The core rule on linear maps and norms, token by token in tiles, for all explained positions at once.

The impact of input i on output j is z_ji = f(0)_j / N + J_ji x_i (Voita et al. 2019 as published in 2021). With a bias,
max(z, 0) does not factor, so z is formed explicitly; a tile is small enough to stay in the processor's cache.

Axes: `r` token of the flattened batch, `o` output, `i` input, `p` explained position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.relevance.voita.trace_functions import NormDetail

TILE = 2**20  # bytes of a tile


@dataclass(frozen=True)
class CoreRule:
    """Parameters of the core rule: shares of positive and negative impacts, and the stabiliser.

    `signed` normalises impacts by their signed sum (eps mode) and has no use for `alpha` and `beta`.
    """

    alpha: float = 0.5
    beta: float = 0.5
    epsilon: float = 1e-5
    signed: bool = False


def stabilised(total: Tensor, epsilon: float) -> Tensor:
    """total + ε·sgn(total), with sgn(0) = 1."""
    return total + torch.where(total < 0, -epsilon, epsilon).to(total)


def positive_and_negative(values: Tensor) -> tuple[Tensor, Tensor]:
    """max(values, 0) and min(values, 0)."""
    return values.clamp(min=0), values.clamp(max=0)


def transition(impact: Tensor, core: CoreRule) -> Tensor:
    """Normalise impacts z [… o i] over i, in place: the transition T [… o i]."""
    if core.signed:
        return impact.div_(stabilised(impact.sum(dim=-1, keepdim=True), core.epsilon))
    positive = impact.clamp(min=0)
    impact.sub_(positive)  # what is negative
    plus = core.alpha / (positive.sum(dim=-1, keepdim=True) + core.epsilon)
    minus = core.beta / (impact.sum(dim=-1, keepdim=True) - core.epsilon)
    return positive.mul_(plus).addcmul_(impact, minus)


def through_linear(relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, core: CoreRule) -> Tensor:
    """Relevance [p r o] of x [r i] · weightᵀ [i o] + bias, at x: [p r i], before any rescaling."""
    share = None if bias is None else bias / x.shape[-1]
    at_inputs = relevance.new_zeros(*relevance.shape[:2], x.shape[-1])
    for tile in _tiles(relevance, x.shape[-1]):
        rows, outputs, _ = tile
        tile_weight, states = weight[outputs], x[rows, None]  # [o i], [r 1 i]
        impact = tile_weight * states if share is None else torch.addcmul(share[outputs, None], tile_weight, states)
        _accumulate(at_inputs, relevance, transition(impact, core), tile)
    return at_inputs


def through_norm(relevance: Tensor, x: Tensor, norm: NormDetail, core: CoreRule, *, published: bool) -> Tensor:
    """Relevance [p r d] of a norm of x [r d], at x: [p r d], before any rescaling.

    J_ji = scale_j · (δ_ji a − c_j c_i b³/d − [centred] a/d) with c the deviations from the mean (x itself in an RMS
    norm) and a = b = 1/σ. `published`: a leaves the norm's epsilon out, as the published code does (not in rows that
    are constant).
    """
    d = x.shape[-1]
    scale = x.new_ones(d) if norm.scale is None else norm.scale.to(x.dtype)
    deviation = x - x.mean(dim=-1, keepdim=True) if norm.centred else x
    variance = deviation.square().mean(dim=-1, keepdim=True)
    inverse = (variance + norm.epsilon).rsqrt()  # b [r 1]
    first = inverse  # a [r 1]
    if published and norm.centred:
        first = torch.where(variance > 0, variance, variance + norm.epsilon).rsqrt()
    zero = torch.zeros_like(x)
    columns = [-deviation * scale, -scale.expand_as(x) if norm.centred else zero]
    columns.append(zero if norm.bias is None else (norm.bias.to(x.dtype) / d).expand_as(x))
    left = torch.stack(columns, dim=-1)  # [r o 3]
    right = torch.stack([deviation * x * inverse**3 / d, first * x / d, torch.ones_like(x)], dim=1)  # [r 3 i]
    diagonal = scale * first * x  # [r d]
    at_inputs = torch.zeros_like(relevance)
    for tile in _tiles(relevance, d):
        rows, outputs, _ = tile
        impact = torch.bmm(left[rows, outputs], right[rows])
        impact.diagonal(outputs.start, 1, 2).add_(diagonal[rows, outputs])
        _accumulate(at_inputs, relevance, transition(impact, core), tile)
    return at_inputs


Tile = tuple[slice, slice, slice]


def _tiles(relevance: Tensor, inputs: int) -> Iterator[Tile]:
    """Tokens, outputs and explained positions of every tile; tokens that no relevance reaches are left out."""
    _, r, o = relevance.shape
    rows_of_tile = max(1, TILE // (relevance.element_size() * inputs))  # rows of z in a tile
    tokens, outputs = max(1, rows_of_tile // o), min(o, rows_of_tile)
    reached = relevance.ne(0).any(dim=-1)  # [p r]
    for first in range(0, r, tokens):
        rows = slice(first, min(first + tokens, r))
        positions = reached[:, rows].any(dim=-1).nonzero()[:, 0]
        if len(positions):
            span = slice(int(positions[0]), int(positions[-1]) + 1)
            for start in range(0, o, outputs):
                yield rows, slice(start, min(start + outputs, o)), span


def _accumulate(at_inputs: Tensor, relevance: Tensor, transitions: Tensor, tile: Tile) -> None:
    """at_inputs[p r i] += Σ_o relevance[p r o] · T[r o i] for one tile."""
    rows, outputs, positions = tile
    at_outputs, into = relevance[positions, rows, outputs], at_inputs[positions, rows]
    if transitions.shape[0] == 1:
        into[:, 0].addmm_(at_outputs[:, 0], transitions[0])
    else:
        into.add_(torch.bmm(at_outputs.transpose(0, 1), transitions).transpose(0, 1))
