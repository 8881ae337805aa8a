"""Transitions of linear maps and norms, built token by token in blocks and applied to all explained positions.

The impact of input i on output j is z_ji = f(0)_j / N + J_ji x_i (Voita et al. 2019 as published in 2021,
`headscope.relevance.voita.voita`). With a bias, max(z, 0) does not factor, so it is formed explicitly; a tile is small
enough to stay in the processor's cache while it is normalised.

Axes: `r` a token of the flattened batch, `o` output, `i` input, `p` explained position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 2**20  # bytes of a tile


@dataclass(frozen=True)
class CoreRule:
    """Parameters of the core rule: shares of positive and negative impacts, and the stabiliser."""

    alpha: float = 0.5
    beta: float = 0.5
    epsilon: float = 1e-5
    signed: bool = False


def stabilised(total: Tensor, epsilon: float) -> Tensor:
    """total + ε·sgn(total), with sgn(0) = 1."""
    return total + torch.where(total < 0, -epsilon, epsilon).to(total)


def transition(impact: Tensor, core: CoreRule) -> Tensor:
    """Normalise impacts z [… o i] over i, in place: the transition T [… o i]."""
    if core.signed:
        return impact.div_(stabilised(impact.sum(dim=-1, keepdim=True), core.epsilon))
    positive = impact.clamp(min=0)
    impact.sub_(positive)  # what is negative
    plus = core.alpha / (positive.sum(dim=-1, keepdim=True) + core.epsilon)
    minus = core.beta / (impact.sum(dim=-1, keepdim=True) - core.epsilon)
    return positive.mul_(plus).addcmul_(impact, minus)


def linear_rule(relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, core: CoreRule) -> Tensor:
    """Relevance [p r o] of x [r i] · weightᵀ [i o] + bias, at x: [p r i], before any rescaling."""
    share = None if bias is None else bias / x.shape[-1]
    if core.signed:
        return _signed_linear(relevance, x, weight, bias, core)
    found = relevance.new_zeros(*relevance.shape[:2], x.shape[-1])
    for rows, outputs, at in _tiles(relevance, x.shape[-1]):
        part = weight[outputs]
        given = x[rows, None]  # [r 1 i]
        impact = part * given if share is None else torch.addcmul(share[outputs, None], part, given)
        _apply(found, relevance, transition(impact, core), (rows, outputs, at))
    return found


def _signed_linear(relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, core: CoreRule) -> Tensor:
    """The signed rule is linear in z, so no transition is formed."""
    total = torch.nn.functional.linear(x, weight, bias)  # [r o]
    ratio = relevance / stabilised(total, core.epsilon)
    found = (ratio @ weight).mul_(x)
    return found if bias is None else found.add_((ratio @ (bias / x.shape[-1]))[..., None])


@dataclass(frozen=True)
class Moments:
    """A norm as a function of its input: deviations from the mean (or the input itself), 1/std, parameters.

    `first` is the factor of the Jacobian's diagonal; the published code leaves ε out of it.
    """

    deviation: Tensor  # [r i]
    first: Tensor  # [r 1]
    inverse: Tensor  # [r 1]
    centred: bool


def moments(x: Tensor, *, centred: bool, epsilon: float, published: bool) -> Moments:
    """Deviations and inverse standard deviations of x [r i]; constant rows keep their ε."""
    deviation = x - x.mean(dim=-1, keepdim=True) if centred else x
    variance = deviation.square().mean(dim=-1, keepdim=True)
    inverse = (variance + epsilon).rsqrt()
    bare = published and centred
    first = torch.where(variance > 0, variance, variance + epsilon).rsqrt() if bare else inverse
    return Moments(deviation, first, inverse, centred)


def norm(relevance: Tensor, x: Tensor, its: Moments, scale: Tensor, bias: Tensor | None, core: CoreRule) -> Tensor:
    """Relevance [p r d] of a norm of x [r d], at x: [p r d], before any rescaling.

    J_ji = scale_j · (δ_ji a − c_j c_i b³/d − [centred] a/d) with deviations c, a = `first`, b = `inverse`.
    """
    d = x.shape[-1]
    columns = [-its.deviation * scale, -scale.expand_as(x) if its.centred else torch.zeros_like(x)]
    columns.append(torch.zeros_like(x) if bias is None else (bias / d).expand_as(x))
    left = torch.stack(columns, dim=-1)  # [r o 3]
    right = torch.stack(
        [its.deviation * x * its.inverse**3 / d, its.first * x / d, torch.ones_like(x)], dim=1
    )  # [r 3 i]
    diagonal = scale * its.first * x  # [r d]
    found = torch.zeros_like(relevance)
    for rows, outputs, at in _tiles(relevance, d):
        impact = torch.bmm(left[rows, outputs], right[rows])
        impact.diagonal(outputs.start, 1, 2).add_(diagonal[rows, outputs])
        _apply(found, relevance, transition(impact, core), (rows, outputs, at))
    return found


Tile = tuple[slice, slice, slice]


def _tiles(relevance: Tensor, inputs: int) -> Iterator[Tile]:
    """Tokens, outputs and explained positions of every tile; tokens that no relevance reaches are left out."""
    _, r, o = relevance.shape
    most = max(1, TILE // (relevance.element_size() * inputs))  # rows of z in a tile
    tokens, outputs = max(1, most // o), min(o, most)
    reached = relevance.ne(0).any(dim=-1)  # [p r]
    for first in range(0, r, tokens):
        rows = slice(first, min(first + tokens, r))
        at = reached[:, rows].any(dim=-1).nonzero()[:, 0]
        if len(at):
            positions = slice(int(at[0]), int(at[-1]) + 1)
            for start in range(0, o, outputs):
                yield rows, slice(start, min(start + outputs, o)), positions


def _apply(found: Tensor, relevance: Tensor, transitions: Tensor, tile: Tile) -> None:
    """found[p r i] += Σ_o relevance[p r o] · T[r o i] for one tile."""
    rows, outputs, at = tile
    given, into = relevance[at, rows, outputs], found[at, rows]
    if transitions.shape[0] == 1:
        into[:, 0].addmm_(given[:, 0], transitions[0])
    else:
        into.add_(torch.bmm(given.transpose(0, 1), transitions).transpose(0, 1))
