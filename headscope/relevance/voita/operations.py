"""The core rule on linear maps, norms and whole softmax attentions, for all explained positions at once.

The impact of input i on output j is z_ji = f(0)_j / N + J_ji x_i (Voita et al. 2019 as published in 2021). With a bias,
max(z, 0) does not factor, so z is formed explicitly; a tile is small enough to stay in the processor's cache.

Axes: `r` token of the flattened batch, `o` output, `i` input, `p` explained position.

A whole softmax attention is one operation per sentence and head, in closed form. `core_attention` is the core rule on
o[t,c] = Σ_s a[t,s] v[s,c] as a function of all its queries, keys and values, with bias 0. With U[t,c,s] =
a[t,s]·(v[s,c] − o[t,c]) and Q = scaling · q, the impacts on o[t,c] are

- of v[s,c]: a[t,s] v[s,c];
- of q[t,e]: Q[t,e] · Σ_s U[t,c,s] k[s,e], a sum over s before its sign is taken, so it is formed explicitly;
- of k[s,e]: U[t,c,s] · Q[t,e] k[s,e], whose positive part is U⁺(Qk)⁺ + U⁻(Qk)⁻ and whose negative part is
  U⁺(Qk)⁻ + U⁻(Qk)⁺, which makes all sums over them matrix products.

`ratio_attention` is the paper's rule.

Axes: `n` sentence and head, `t` query, `s` key, `c` width of values, `e` width of keys, `p` explained position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.model.attention import AttentionCall, repeat_groups
from headscope.relevance.modules import NormParameters

TILE = 2**20  # bytes of a tile


SHARE = 0.5
"""Of positive impacts, and of negative ones (α and β)."""
EPSILON = 1e-5


def stabilize(total: Tensor, epsilon: float) -> Tensor:
    """total + ε·sgn(total), with sgn(0) = 1."""
    return total + torch.where(total < 0, -epsilon, epsilon).to(total)


def positive_and_negative(values: Tensor) -> tuple[Tensor, Tensor]:
    """max(values, 0) and min(values, 0)."""
    return values.clamp(min=0), values.clamp(max=0)


def transition(impact: Tensor, keeps_sign: bool) -> Tensor:
    """Normalise impacts z [… o i] over i, in place: the transition T [… o i]."""
    if keeps_sign:
        return impact.div_(stabilize(impact.sum(dim=-1, keepdim=True), EPSILON))
    positive = impact.clamp(min=0)
    impact.sub_(positive)  # what is negative
    plus = SHARE / (positive.sum(dim=-1, keepdim=True) + EPSILON)
    minus = SHARE / (impact.sum(dim=-1, keepdim=True) - EPSILON)
    return positive.mul_(plus).addcmul_(impact, minus)


def through_linear(relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keeps_sign: bool) -> Tensor:
    """Relevance [p r o] of x [r i] · weightᵀ [i o] + bias, at x: [p r i], before any rescaling."""
    share = None if bias is None else bias / x.shape[-1]
    at_inputs = relevance.new_zeros(*relevance.shape[:2], x.shape[-1])
    for tile in _tiles(relevance, x.shape[-1]):
        rows, outputs, _ = tile
        tile_weight, states = weight[outputs], x[rows, None]  # [o i], [r 1 i]
        impact = tile_weight * states if share is None else torch.addcmul(share[outputs, None], tile_weight, states)
        _accumulate(at_inputs, relevance, transition(impact, keeps_sign), tile)
    return at_inputs


def through_norm(relevance: Tensor, x: Tensor, norm: NormParameters, keeps_sign: bool) -> Tensor:
    """Relevance [p r d] of a norm of x [r d], at x: [p r d], before any rescaling.

    J_ji = scale_j · (δ_ji a − c_j c_i b³/d − [centred] a/d) with c the deviations from the mean (x itself in an RMS
    norm) and b = 1/σ; a leaves the epsilon of a layer norm out, as the published code does (not in rows that are
    constant).
    """
    d = x.shape[-1]
    scale = x.new_ones(d) if norm.scale is None else norm.scale.to(x.dtype)
    deviation = x - x.mean(dim=-1, keepdim=True) if norm.centred else x
    variance = deviation.square().mean(dim=-1, keepdim=True)
    inverse = (variance + norm.epsilon).rsqrt()  # b [r 1]
    first = inverse  # a [r 1]
    if norm.centred:
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
        _accumulate(at_inputs, relevance, transition(impact, keeps_sign), tile)
    return at_inputs


Tile = tuple[slice, slice, slice]


def _tiles(relevance: Tensor, inputs: int) -> Iterator[Tile]:
    """Tokens, outputs and explained positions of every tile; tokens that no relevance reaches are left out."""
    _, r, o = relevance.shape
    rows_of_tile = max(1, TILE // (relevance.element_size() * inputs))  # rows of z in a tile
    tokens, outputs = max(1, rows_of_tile // o), min(o, rows_of_tile)
    is_reached = relevance.ne(0).any(dim=-1)  # [p r]
    for first in range(0, r, tokens):
        rows = slice(first, min(first + tokens, r))
        positions = is_reached[:, rows].any(dim=-1).nonzero()[:, 0]
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


class AttentionInputs(NamedTuple):
    """An attention call in the precision of the rules, heads and sentences as one axis.

    query [n t e], times its `scaling`; key [n s e], value [n s c], weights [n t s], context [n t c].
    `slope` [n t s] are the weights times the slope of a soft cap, where there is one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    context: Tensor
    slope: Tensor
    scaling: float

    def rows(self, rows: slice) -> AttentionInputs:
        """The same for some of the queries."""
        by_query = ("query", "weights", "context", "slope")
        return self._replace(**{name: getattr(self, name)[:, rows] for name in by_query})


def attention_inputs(call: AttentionCall, dtype: torch.dtype) -> AttentionInputs:
    """The heads of a call; keys and values of a group are given to each of its query heads."""
    h = call.query.shape[1]
    query, key, value = (states.to(dtype) for states in (call.query, call.key, call.value))
    scaling = query.shape[-1] ** -0.5 if call.options.scaling is None else float(call.options.scaling)
    query = query * scaling
    key, value, weights = repeat_groups(key, h), repeat_groups(value, h), call.weights.to(dtype)
    slope = weights
    if call.options.softcap is not None:
        slope = weights * (1 - torch.tanh(query @ key.transpose(-1, -2) / call.options.softcap).square())
    query, key, value, weights, context, slope = (
        tensor.flatten(0, 1) for tensor in (query, key, value, weights, weights @ value, slope)
    )
    return AttentionInputs(query, key, value, weights, context, slope, scaling)


def by_head(relevance: Tensor, heads: int) -> Tensor:
    """Split sentences and heads: [p n …] to [p b h …]."""
    return relevance.reshape(len(relevance), -1, heads, *relevance.shape[2:])


def by_group(relevance: Tensor, groups: int) -> Tensor:
    """Split the query heads by group: [p b h s k] to [p b g h/g s k]."""
    p, b, h, *axes = relevance.shape
    return relevance.reshape(p, b, groups, h // groups, *axes)


AtInputs = tuple[Tensor | None, Tensor | None, Tensor]
"""Relevance at queries [p n t e], keys [p n s e] and values [p n s c]; None where none goes."""


def core_attention(
    relevance: Tensor, inputs: AttentionInputs, block: int, *, keeps_sign: bool, constant: bool
) -> AtInputs:
    """The core rule, rescaled per sentence and head; with `constant` weights all relevance goes to values.

    Queries are computed block by block, at least one of them at a time.
    """
    queries, keys, values = parts = _zeros(relevance, inputs)
    if constant:
        _add_values(values, relevance, inputs, keeps_sign, _value_sums(inputs))
    else:
        step = _add_signed if keeps_sign else _positive_and_negative
        for rows in query_blocks(relevance, inputs, block):
            step((queries[:, :, rows], keys, values), relevance[:, :, rows], inputs.rows(rows), keeps_sign)
    size = sum(part.abs().sum(dim=(-1, -2), keepdim=True) for part in parts) + EPSILON
    factor = relevance.abs().sum(dim=(-1, -2), keepdim=True) / size  # [p n 1 1]
    return (None, None, values * factor) if constant else (queries * factor, keys * factor, values * factor)


def _zeros(relevance: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values = (
        relevance.new_zeros(*relevance.shape[:2], *states.shape[1:])
        for states in (inputs.query, inputs.key, inputs.value)
    )
    return queries, keys, values


def query_blocks(relevance: Tensor, inputs: AttentionInputs, block: int) -> Iterator[slice]:
    """Queries that are computed together, so that intermediates stay within `block` bytes."""
    p, n, t, c = relevance.shape
    s, e = inputs.key.shape[1:]
    per_query = n * relevance.element_size() * (7 * c * s + 5 * c * e + 8 * p * s)  # held by _positive_and_negative
    size = max(1, block // max(per_query, 1))
    yield from (slice(first, min(first + size, t)) for first in range(0, t, size))


def _value_sums(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Sums over s of the positive and of the negative impacts of values [n t c]."""
    positive, negative = positive_and_negative(inputs.value)
    return inputs.weights @ positive, inputs.weights @ negative


def _add_values(
    values: Tensor, relevance: Tensor, inputs: AttentionInputs, keeps_sign: bool, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the values' part; `sums` are positive and negative impacts on each output. Returns [r⁺ r⁻] [2 p n t c]."""
    if keeps_sign:
        ratio = (relevance / stabilize(sums[0] + sums[1], EPSILON))[None]
        values += inputs.weights.transpose(-1, -2) @ ratio[0] * inputs.value
        return ratio
    plus = relevance * (SHARE / (sums[0] + EPSILON))
    minus = relevance * (SHARE / (sums[1] - EPSILON))
    back = inputs.weights.transpose(-1, -2)
    positive, negative = positive_and_negative(inputs.value)
    values += (back @ plus) * positive + (back @ minus) * negative
    return torch.stack([plus, minus])


def _deviations(inputs: AttentionInputs) -> Tensor:
    """U [n t c s]."""
    return (inputs.value.transpose(1, 2)[:, None] - inputs.context[..., None]) * inputs.slope[:, :, None]


def _positive_and_negative(
    into: tuple[Tensor, Tensor, Tensor], relevance: Tensor, inputs: AttentionInputs, keeps_sign: bool
) -> None:
    """One block of queries, positive and negative impacts normalised apart."""
    queries, keys, values = into
    up, down = positive_and_negative(_deviations(inputs))  # [n t c s]
    query_up, query_down = positive_and_negative(inputs.query)
    key_up, key_down = positive_and_negative(inputs.key)
    products = query_up @ key_up.mT + query_down @ key_down.mT  # Σ_e (Qk)⁺ [n t s]
    opposite_products = query_up @ key_down.mT + query_down @ key_up.mT  # Σ_e (Qk)⁻
    left = torch.cat([up, down], dim=-1)  # [n t c 2s]
    by_sign = torch.cat([products, opposite_products], -1), torch.cat([opposite_products, products], -1)
    right = torch.stack(by_sign, dim=-1)
    of_keys = left @ right  # [n t c 2]
    of_queries = ((up + down).flatten(1, 2) @ inputs.key).unflatten(1, up.shape[1:3]) * inputs.query[:, :, None]
    queries_up, queries_down = positive_and_negative(of_queries)  # Σ_s U[t,c,s] k[s,e] · Q[t,e]: [n t c e]
    values_up, values_down = _value_sums(inputs)
    sum_up = values_up + queries_up.sum(dim=-1) + of_keys[..., 0]
    sums = sum_up, values_down + queries_down.sum(dim=-1) + of_keys[..., 1]
    ratio = _add_values(values, relevance, inputs, keeps_sign, sums).permute(2, 3, 0, 1, 4)  # [n t 2 p c]
    p, s = ratio.shape[3], inputs.key.shape[1]
    queries += (ratio[:, :, 0] @ queries_up + ratio[:, :, 1] @ queries_down).permute(2, 0, 1, 3)
    weighted_deviations = ratio.flatten(2, 3) @ left  # [n t 2p 2s]
    along = weighted_deviations[:, :, :p, :s] + weighted_deviations[:, :, p:, s:]  # coefficient of (Qk)⁺: [n t p s]
    against = weighted_deviations[:, :, :p, s:] + weighted_deviations[:, :, p:, :s]
    coefficients = torch.cat([along, against], dim=1).permute(0, 2, 3, 1)  # [n p s 2t]
    halves = torch.cat([query_up, query_down], dim=1), torch.cat([query_down, query_up], dim=1)
    sides = torch.cat(halves, dim=-1)  # [n 2t 2e]
    n, e = inputs.query.shape[0], inputs.query.shape[-1]
    weighted_sides = (coefficients.reshape(n, p * s, -1) @ sides).view(n, p, s, 2 * e).transpose(0, 1)
    keys += weighted_sides[..., :e] * key_up + weighted_sides[..., e:] * key_down


def _add_signed(
    into: tuple[Tensor, Tensor, Tensor], relevance: Tensor, inputs: AttentionInputs, keeps_sign: bool
) -> None:
    """One block of queries, impacts with their signs: linear in z."""
    queries, keys, values = into
    deviations = _deviations(inputs)
    scores = inputs.query @ inputs.key.mT  # [n t s]
    twice = 2 * (deviations @ scores[..., None])[..., 0]  # queries and keys have the same sum
    sums = (inputs.context + twice, torch.zeros_like(twice))
    ratio = _add_values(values, relevance, inputs, keeps_sign, sums)[0]
    weighted_deviations = (ratio.permute(1, 2, 0, 3) @ deviations).permute(2, 0, 1, 3)  # Σ_c r U: [p n t s]
    queries += (weighted_deviations @ inputs.key) * inputs.query
    keys += (weighted_deviations.mT @ inputs.query) * inputs.key


def ratio_attention(relevance: Tensor, inputs: AttentionInputs, block: int, *, epsilon: float) -> AtInputs:
    """Contribution ratios of weights·V and of query·key, both sums of products; the softmax hands relevance on."""
    queries, keys, values = _zeros(relevance, inputs)
    for rows in query_blocks(relevance, inputs, block):
        own = inputs.rows(rows)
        at_products = relevance[:, :, rows] / stabilize(own.context, epsilon)
        to_weights, to_values = _product_ratios(own.weights[:, :, None], own.value.mT[:, None], epsilon)  # [n t c s]
        values += torch.einsum("pntc,ntcs->pnsc", at_products, to_values)
        at_scores = torch.einsum("pntc,ntcs->pnts", at_products, to_weights)
        at_products = at_scores / stabilize(own.query @ own.key.mT, epsilon)
        to_queries, to_keys = _product_ratios(own.query[..., None], own.key.mT[:, None], epsilon)  # [n t e s]
        queries[:, :, rows] = torch.einsum("pnts,ntes->pnte", at_products, to_queries)
        keys += torch.einsum("pnts,ntes->pnse", at_products, to_keys)
    return queries, keys, values


def _product_ratios(a: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The relevance of a product's factors: a·b · a / (a + b), a·b · b / (a + b)."""
    ratio = a * b / stabilize(a + b, epsilon)
    return ratio * a, ratio * b
