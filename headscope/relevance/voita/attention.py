"""The core rule through a whole softmax attention, in closed form.

One operation per sentence and head: o[t,c] = Σ_s a[t,s] v[s,c] as a function of all its queries, keys and
values, with bias 0. With U[t,c,s] = a[t,s]·(v[s,c] − o[t,c]) and Q = scaling · q, the impacts on o[t,c] are

- of v[s,c]: a[t,s] v[s,c];
- of q[t,e]: Q[t,e] · Σ_s U[t,c,s] k[s,e], a sum over s before its sign is taken, so it is formed explicitly;
- of k[s,e]: U[t,c,s] · Q[t,e] k[s,e], whose positive part is U⁺(Qk)⁺ + U⁻(Qk)⁻ and whose negative part is
  U⁺(Qk)⁻ + U⁻(Qk)⁺, which makes all sums over them matrix products.

Axes: `n` sentence and head, `t` query, `s` key, `c` width of values, `e` width of keys, `p` explained position.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headscope.model.attention import AttentionCall, repeat_groups
from headscope.relevance.voita.blocks import CoreRule, stabilised


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

    def rows(self, part: slice) -> AttentionInputs:
        """The same for some of the queries."""
        return AttentionInputs(
            self.query[:, part],
            self.key,
            self.value,
            self.weights[:, part],
            self.context[:, part],
            self.slope[:, part],
            self.scaling,
        )


def attention_inputs(call: AttentionCall, dtype: torch.dtype) -> AttentionInputs:
    """The heads of a call; keys and values of a group are given to each of its query heads."""
    h = call.query.shape[1]
    query, key, value = (part.to(dtype) for part in (call.query, call.key, call.value))
    scaling = query.shape[-1] ** -0.5 if call.scaling is None else float(call.scaling)
    query = query * scaling
    key, value, weights = repeat_groups(key, h), repeat_groups(value, h), call.weights.to(dtype)
    slope = weights
    if call.softcap is not None:
        slope = weights * (1 - torch.tanh(query @ key.transpose(-1, -2) / call.softcap).square())
    query, key, value, context, weights, slope = (
        part.flatten(0, 1) for part in (query, key, value, weights @ value, weights, slope)
    )
    return AttentionInputs(query, key, value, weights, context, slope, scaling)


def by_head(relevance: Tensor, heads: int) -> Tensor:
    """Sentences and heads apart again: [p n …] to [p b h …]."""
    return relevance.reshape(len(relevance), -1, heads, *relevance.shape[2:])


def by_group(relevance: Tensor, groups: int) -> Tensor:
    """The query heads of each group apart: [p b h s k] to [p b g h/g s k]."""
    p, b, h, *rest = relevance.shape
    return relevance.reshape(p, b, groups, h // groups, *rest)


Parts = tuple[Tensor | None, Tensor | None, Tensor]


def through(relevance: Tensor, its: AttentionInputs, rule: CoreRule, *, constant: bool, block: int) -> Parts:
    """Relevance [p n t c] of contexts, at queries [p n t e], keys [p n s e] and values [p n s c], not rescaled.

    `constant`: weights are constants, queries and keys get None. `block` is the number of bytes that an intermediate
    may take (at least one query's).
    """
    if constant:
        found = its.value.new_zeros(*relevance.shape[:2], *its.value.shape[1:])
        _values(found, relevance, its, rule, _sums_of_values(its))
        return None, None, found
    p, n = relevance.shape[:2]
    queries = relevance.new_zeros(p, n, *its.query.shape[1:])
    keys = relevance.new_zeros(p, n, *its.key.shape[1:])
    values = relevance.new_zeros(p, n, *its.value.shape[1:])
    step = _signed if rule.signed else _parted
    for rows in blocks(relevance, its, block):
        step((queries[:, :, rows], keys, values), relevance[:, :, rows], its.rows(rows), rule)
    return queries, keys, values


def blocks(relevance: Tensor, its: AttentionInputs, block: int) -> Iterator[slice]:
    """Queries that are gone through together, so that intermediates stay within `block` bytes."""
    p, n, t, c = relevance.shape
    s, e = its.key.shape[1:]
    one = n * relevance.element_size() * (7 * c * s + 5 * c * e + 8 * p * s)  # what `_parted` holds of a query
    size = max(1, block // max(one, 1))
    yield from (slice(first, min(first + size, t)) for first in range(0, t, size))


def _sums_of_values(its: AttentionInputs) -> tuple[Tensor, Tensor]:
    return its.weights @ its.value.clamp(min=0), its.weights @ its.value.clamp(max=0)


def _values(
    found: Tensor, relevance: Tensor, its: AttentionInputs, rule: CoreRule, sums: tuple[Tensor, Tensor]
) -> Tensor:
    """Add the values' part; `sums` are positive and negative impacts on each output. Returns [r⁺ r⁻] [2 p n t c]."""
    if rule.signed:
        ratio = (relevance / stabilised(sums[0] + sums[1], rule.epsilon))[None]
        found += its.weights.transpose(-1, -2) @ ratio[0] * its.value
        return ratio
    plus = relevance * (rule.alpha / (sums[0] + rule.epsilon))
    minus = relevance * (rule.beta / (sums[1] - rule.epsilon))
    back = its.weights.transpose(-1, -2)
    found += (back @ plus) * its.value.clamp(min=0) + (back @ minus) * its.value.clamp(max=0)
    return torch.stack([plus, minus])


def _deviations(its: AttentionInputs) -> Tensor:
    """U [n t c s]."""
    return (its.value.transpose(1, 2)[:, None] - its.context[..., None]) * its.slope[:, :, None]


def _by_query(deviations: Tensor, its: AttentionInputs) -> Tensor:
    """Σ_s U[t,c,s] k[s,e] · Q[t,e]: [n t c e]."""
    n, t, c, s = deviations.shape
    return (deviations.reshape(n, t * c, s) @ its.key).view(n, t, c, -1) * its.query[:, :, None]


def _parted(found: tuple[Tensor, Tensor, Tensor], relevance: Tensor, its: AttentionInputs, rule: CoreRule) -> None:
    """One block of queries, positive and negative impacts apart."""
    queries, keys, values = found
    up, down = _apart(_deviations(its))  # [n t c s]
    query_up, query_down = _apart(its.query)
    key_up, key_down = _apart(its.key)
    products = query_up @ key_up.mT + query_down @ key_down.mT  # Σ_e (Qk)⁺ [n t s]
    opposed = query_up @ key_down.mT + query_down @ key_up.mT  # Σ_e (Qk)⁻
    left, right = (
        torch.cat([up, down], dim=-1),
        torch.stack([torch.cat([products, opposed], -1), torch.cat([opposed, products], -1)], dim=-1),
    )
    of_keys = left @ right  # [n t c 2]
    of_queries = _by_query(up + down, its)
    queries_up, queries_down = _apart(of_queries)
    value_sums = _sums_of_values(its)
    sums = (
        value_sums[0] + queries_up.sum(dim=-1) + of_keys[..., 0],
        value_sums[1] + queries_down.sum(dim=-1) + of_keys[..., 1],
    )
    ratio = _values(values, relevance, its, rule, sums)  # [2 p n t c]
    given = ratio.permute(2, 3, 0, 1, 4)  # [n t 2 p c]
    p = given.shape[3]
    back = given[:, :, 0] @ queries_up + given[:, :, 1] @ queries_down  # [n t p e]
    queries += back.permute(2, 0, 1, 3)
    reached = given.flatten(2, 3) @ left  # [n t 2p 2s]
    s = its.key.shape[1]
    along = reached[:, :, :p, :s] + reached[:, :, p:, s:]  # coefficient of (Qk)⁺: [n t p s]
    against = reached[:, :, :p, s:] + reached[:, :, p:, :s]
    both = torch.cat([along, against], dim=1).permute(0, 2, 3, 1)  # [n p s 2t]
    sides = torch.cat(
        [torch.cat([query_up, query_down], dim=1), torch.cat([query_down, query_up], dim=1)], dim=-1
    )  # [n 2t 2e]
    n, e = its.query.shape[0], its.query.shape[-1]
    summed = (both.reshape(n, p * s, -1) @ sides).view(n, p, s, 2 * e).transpose(0, 1)
    keys += summed[..., :e] * key_up + summed[..., e:] * key_down


def _signed(found: tuple[Tensor, Tensor, Tensor], relevance: Tensor, its: AttentionInputs, rule: CoreRule) -> None:
    """One block of queries, impacts with their signs: linear in z."""
    queries, keys, values = found
    deviations = _deviations(its)
    scores = its.query @ its.key.mT  # [n t s]
    twice = 2 * (deviations @ scores[..., None])[..., 0]  # queries and keys have the same sum
    ratio = _values(values, relevance, its, rule, (its.context + twice, torch.zeros_like(twice)))[0]
    reached = ratio.permute(1, 2, 0, 3) @ deviations  # Σ_c r U: [n t p s]
    reached = reached.permute(2, 0, 1, 3)  # [p n t s]
    queries += (reached @ its.key) * its.query
    keys += (reached.mT @ its.query) * its.key


def _apart(values: Tensor) -> tuple[Tensor, Tensor]:
    return values.clamp(min=0), values.clamp(max=0)
