"""The core rule on linear maps, norms and whole softmax attentions, for all explained positions at once.

The impact of input i on output j is z_ji = f(0)_j / N + J_ji x_i, N inputs (code of Voita et al. 2019, published 2021).
With a bias, max(z, 0) does not factor, so z is computed explicitly, in tiles that fit into the processor's cache.

Axes: `r` token of the flattened batch, `o` output, `i` input, `p` explained position.

A whole softmax attention is one operation per sentence and head, in closed form. `core_attention` is the core rule on
o[t,c] = Σ_s a[t,s] v[s,c] as a function of all its queries, keys and values, with bias 0. With U[t,c,s] =
a[t,s]·(v[s,c] − o[t,c]) and Q = scaling · q, the impacts on o[t,c] are

- of v[s,c]: a[t,s] v[s,c];
- of q[t,e]: Q[t,e] · Σ_s U[t,c,s] k[s,e]; the rule needs the sign of this sum, so it is computed explicitly;
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
SHARE = 0.5  # of relevance that goes to positive impacts, and to negative ones (α and β)
EPSILON = 1e-5


def stabilize(total: Tensor, epsilon: float) -> Tensor:
    """total + ε·sgn(total), with sgn(0) = 1."""
    return total + torch.where(total < 0, -epsilon, epsilon).to(total)


def positive_and_negative(values: Tensor) -> tuple[Tensor, Tensor]:
    """max(values, 0) and min(values, 0)."""
    return values.clamp(min=0), values.clamp(max=0)


def transition(impact: Tensor, keeps_sign: bool) -> Tensor:
    """The transition T [… o i] of impacts z [… o i], normalised over i; overwrites z."""
    if keeps_sign:
        return impact.div_(stabilize(impact.sum(dim=-1, keepdim=True), EPSILON))
    positive = impact.clamp(min=0)
    negative = impact.sub_(positive)
    plus = SHARE / (positive.sum(dim=-1, keepdim=True) + EPSILON)
    minus = SHARE / (negative.sum(dim=-1, keepdim=True) - EPSILON)
    return positive.mul_(plus).addcmul_(negative, minus)


def through_linear(relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, keeps_sign: bool) -> Tensor:
    """The relevance [p r i] of x [r i], from that of the outputs [p r o] of x · weightᵀ [i o] + bias; not rescaled."""
    share = None if bias is None else bias / x.shape[-1]
    at_inputs = relevance.new_zeros(*relevance.shape[:2], x.shape[-1])
    for tile in _tiles(relevance, x.shape[-1]):
        rows, outputs, _ = tile
        tile_weight, states = weight[outputs], x[rows, None]  # [o i], [r 1 i]
        impact = tile_weight * states if share is None else torch.addcmul(share[outputs, None], tile_weight, states)
        _accumulate(at_inputs, relevance, transition(impact, keeps_sign), tile)
    return at_inputs


def through_norm(relevance: Tensor, x: Tensor, norm: NormParameters, keeps_sign: bool) -> Tensor:
    """The relevance [p r d] of x [r d], from that of the outputs [p r d] of a norm; not rescaled.

    J_ji = scale_j · (δ_ji a − c_j c_i b³/d − [centred] a/d) with c the deviations from the mean (x itself in an RMS
    norm) and b = 1/σ. As in the published code, a is b without the epsilon in a layer norm, except in constant rows.
    """
    d = x.shape[-1]
    scale = x.new_ones(d) if norm.scale is None else norm.scale.to(x.dtype)
    deviation = x - x.mean(dim=-1, keepdim=True) if norm.centred else x
    variance = deviation.square().mean(dim=-1, keepdim=True)
    b = (variance + norm.epsilon).rsqrt()  # [r 1]
    a = torch.where(variance > 0, variance, variance + norm.epsilon).rsqrt() if norm.centred else b  # [r 1]
    zero = torch.zeros_like(x)
    columns = [-deviation * scale, -scale.expand_as(x) if norm.centred else zero]
    columns.append(zero if norm.bias is None else (norm.bias.to(x.dtype) / d).expand_as(x))
    left = torch.stack(columns, dim=-1)  # [r o 3]
    right = torch.stack([deviation * x * b**3 / d, a * x / d, torch.ones_like(x)], dim=1)  # [r 3 i]
    diagonal = scale * a * x  # [r d]
    at_inputs = torch.zeros_like(relevance)
    for tile in _tiles(relevance, d):
        rows, outputs, _ = tile
        impact = torch.bmm(left[rows, outputs], right[rows])
        impact.diagonal(outputs.start, 1, 2).add_(diagonal[rows, outputs])
        _accumulate(at_inputs, relevance, transition(impact, keeps_sign), tile)
    return at_inputs


Tile = tuple[slice, slice, slice]


def _tiles(relevance: Tensor, inputs: int) -> Iterator[Tile]:
    """Tokens, outputs and explained positions of every tile, where there is any relevance [p r o]."""
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

    query [n t e], multiplied by `scaling`; key [n s e], value [n s c], weights [n t s], context [n t c]; `slope`
    [n t s] has the weights, times the derivative of a soft cap on scores if there is one.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weights: Tensor
    context: Tensor
    slope: Tensor
    scaling: float

    def rows(self, rows: slice) -> AttentionInputs:
        """The inputs of some of the queries."""
        by_query = ("query", "weights", "context", "slope")
        return self._replace(**{name: getattr(self, name)[:, rows] for name in by_query})


def attention_inputs(call: AttentionCall, dtype: torch.dtype) -> AttentionInputs:
    """The inputs of a call in a `dtype`; keys and values of a group are repeated for its query heads."""
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
"""Relevance of queries [p n t e], keys [p n s e] and values [p n s c]; None where it is not propagated."""


def core_attention(
    relevance: Tensor, inputs: AttentionInputs, block: int, *, keeps_sign: bool, constant: bool
) -> AtInputs:
    """The core rule, rescaled per sentence and head; with `constant` weights all relevance goes to values.

    Queries are processed in blocks whose intermediates fit into `block` bytes, at least one query at a time.
    """
    queries, keys, values = parts = _zeros(relevance, inputs)
    if constant:
        _add_values(values, relevance, inputs, keeps_sign, _value_sums(inputs))
    else:
        add_block = _add_signed if keeps_sign else _add_by_sign
        for rows in query_blocks(relevance, inputs, block):
            add_block((queries[:, :, rows], keys, values), relevance[:, :, rows], inputs.rows(rows))
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
    """Blocks of queries whose intermediates stay within `block` bytes."""
    p, n, t, c = relevance.shape
    s, e = inputs.key.shape[1:]
    per_query = n * relevance.element_size() * (7 * c * s + 5 * c * e + 8 * p * s)  # held by _add_by_sign
    size = max(1, block // max(per_query, 1))
    yield from (slice(first, min(first + size, t)) for first in range(0, t, size))


def _value_sums(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Sums over s of the positive and of the negative impacts of values [n t c]."""
    positive, negative = positive_and_negative(inputs.value)
    return inputs.weights @ positive, inputs.weights @ negative


def _add_values(
    values: Tensor, relevance: Tensor, inputs: AttentionInputs, keeps_sign: bool, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the relevance of values; `sums` are the positive and the negative impacts on each output, summed [n t c].

    Returns relevance per unit of positive and of negative impact [2 p n t c], or of any impact [1 p n t c].
    """
    if keeps_sign:
        ratio = (relevance / stabilize(sums[0] + sums[1], EPSILON))[None]
        values += inputs.weights.mT @ ratio[0] * inputs.value
        return ratio
    plus = relevance * (SHARE / (sums[0] + EPSILON))
    minus = relevance * (SHARE / (sums[1] - EPSILON))
    positive, negative = positive_and_negative(inputs.value)
    values += (inputs.weights.mT @ plus) * positive + (inputs.weights.mT @ minus) * negative
    return torch.stack([plus, minus])


def _deviations(inputs: AttentionInputs) -> Tensor:
    """U [n t c s]."""
    return (inputs.value.transpose(1, 2)[:, None] - inputs.context[..., None]) * inputs.slope[:, :, None]


def _add_by_sign(parts: tuple[Tensor, Tensor, Tensor], relevance: Tensor, inputs: AttentionInputs) -> None:
    """Add the relevance of one block of queries to `parts`; positive and negative impacts are normalised separately."""
    queries, keys, values = parts
    up, down = positive_and_negative(_deviations(inputs))  # [n t c s]
    query_up, query_down = positive_and_negative(inputs.query)
    key_up, key_down = positive_and_negative(inputs.key)
    products = query_up @ key_up.mT + query_down @ key_down.mT  # Σ_e (Qk)⁺ [n t s]
    opposite_products = query_up @ key_down.mT + query_down @ key_up.mT  # Σ_e (Qk)⁻
    left = torch.cat([up, down], dim=-1)  # [n t c 2s]
    by_sign = torch.cat([products, opposite_products], -1), torch.cat([opposite_products, products], -1)
    right = torch.stack(by_sign, dim=-1)  # [n t 2s 2]
    keys_up, keys_down = (left @ right).unbind(-1)  # sums of the impacts of keys, by sign [n t c]
    query_impacts = ((up + down).flatten(1, 2) @ inputs.key).unflatten(1, up.shape[1:3]) * inputs.query[:, :, None]
    queries_up, queries_down = positive_and_negative(query_impacts)  # Σ_s U[t,c,s] k[s,e] · Q[t,e]: [n t c e]
    values_up, values_down = _value_sums(inputs)
    sum_up = values_up + queries_up.sum(dim=-1) + keys_up
    sum_down = values_down + queries_down.sum(dim=-1) + keys_down
    ratio = _add_values(values, relevance, inputs, False, (sum_up, sum_down)).permute(2, 3, 0, 1, 4)  # [n t 2 p c]
    p, s = ratio.shape[3], inputs.key.shape[1]
    queries += (ratio[:, :, 0] @ queries_up + ratio[:, :, 1] @ queries_down).permute(2, 0, 1, 3)
    weighted_deviations = ratio.flatten(2, 3) @ left  # [n t 2p 2s]
    along = weighted_deviations[:, :, :p, :s] + weighted_deviations[:, :, p:, s:]  # coefficient of (Qk)⁺: [n t p s]
    against = weighted_deviations[:, :, :p, s:] + weighted_deviations[:, :, p:, :s]  # coefficient of (Qk)⁻
    coefficients = torch.cat([along, against], dim=1).permute(0, 2, 3, 1)  # [n p s 2t]
    halves = torch.cat([query_up, query_down], dim=1), torch.cat([query_down, query_up], dim=1)
    sides = torch.cat(halves, dim=-1)  # [n 2t 2e]
    n, e = inputs.query.shape[0], inputs.query.shape[-1]
    weighted_sides = (coefficients.reshape(n, p * s, -1) @ sides).view(n, p, s, 2 * e).transpose(0, 1)
    keys += weighted_sides[..., :e] * key_up + weighted_sides[..., e:] * key_down


def _add_signed(parts: tuple[Tensor, Tensor, Tensor], relevance: Tensor, inputs: AttentionInputs) -> None:
    """Add the relevance of one block of queries to `parts`; impacts keep their signs, so all is linear in them."""
    queries, keys, values = parts
    deviations = _deviations(inputs)
    scores = inputs.query @ inputs.key.mT  # [n t s]
    doubled = 2 * (deviations @ scores[..., None])[..., 0]  # queries and keys have the same sum
    sums = (inputs.context + doubled, torch.zeros_like(doubled))
    ratio = _add_values(values, relevance, inputs, True, sums)[0]
    weighted_deviations = (ratio.permute(1, 2, 0, 3) @ deviations).permute(2, 0, 1, 3)  # Σ_c r U: [p n t s]
    queries += (weighted_deviations @ inputs.key) * inputs.query
    keys += (weighted_deviations.mT @ inputs.query) * inputs.key


def ratio_attention(relevance: Tensor, inputs: AttentionInputs, block: int, *, epsilon: float) -> AtInputs:
    """Contribution ratios of weights·V and of query·key, both sums of products; scores get the relevance of weights."""
    queries, keys, values = _zeros(relevance, inputs)
    for rows in query_blocks(relevance, inputs, block):
        subset = inputs.rows(rows)
        per_context = relevance[:, :, rows] / stabilize(subset.context, epsilon)  # [p n t c]
        to_weights, to_values = _product_ratios(
            subset.weights[:, :, None], subset.value.mT[:, None], epsilon
        )  # [n t c s]
        values += torch.einsum("pntc,ntcs->pnsc", per_context, to_values)
        at_scores = torch.einsum("pntc,ntcs->pnts", per_context, to_weights)
        per_score = at_scores / stabilize(subset.query @ subset.key.mT, epsilon)  # [p n t s]
        to_queries, to_keys = _product_ratios(subset.query[..., None], subset.key.mT[:, None], epsilon)  # [n t e s]
        queries[:, :, rows] = torch.einsum("pnts,ntes->pnte", per_score, to_queries)
        keys += torch.einsum("pnts,ntes->pnse", per_score, to_keys)
    return queries, keys, values


def _product_ratios(a: Tensor, b: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The relevance of a product's factors: a·b · a / (a + b), a·b · b / (a + b)."""
    ratio = a * b / stabilize(a + b, epsilon)
    return ratio * a, ratio * b
