"""The rules of Voita et al. (2019), in the version of their program and in that of their paper.

"2021" is their program since June 2021. Every operation is one map y = f(x) of all its inputs. Its impacts
z_ji = f(0)_j / N + J_ji x_i are normalised over i, positive and negative ones separately (alpha-beta, α = β = ½, both
added) or together (eps mode), and the result is rescaled to the total absolute relevance of the outputs.

"paper" is the rule of the paper's appendix A (after Ding et al. 2017): contribution ratios W_uv u / Σ_u' W_u'v u' for
weighted sums, u / Σ_u' u' for products. Nothing is rescaled. The paper leaves some choices open. Here biases have no
part in the ratios (a weighted sum conserves relevance); weights·V and query·key are sums of products, with queries
scaled first; and denominators get ε = 1e-9 with their sign, so 0 / 0 is 0. Ratios are unbounded where a denominator is
near zero, so numbers of this version are inexact in float32.

Relevance passes activations unchanged in both versions, norms and the softmax in "paper".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from headscope.model.attention import AttentionCall
from headscope.relevance.modules import NormParameters
from headscope.relevance.voita.operations import (
    EPSILON,
    SHARE,
    AtInputs,
    attention_inputs,
    by_group,
    by_head,
    core_attention,
    positive_and_negative,
    ratio_attention,
    stabilize,
    through_linear,
    through_norm,
    transition,
)


@dataclass(frozen=True, kw_only=True)
class VoitaSettings:
    """Settings of the rules; the defaults are the program's.

    - `version` "2021": the program; "paper": the rule in the paper's appendix A, which has no other settings.
    - `mode` "alpha-beta": positive and negative impacts are normalised separately; "eps": together.
    - `attention_constant`: attention weights are constants, so relevance goes to values only.
    """

    version: Literal["2021", "paper"] = "2021"
    mode: Literal["alpha-beta", "eps"] = "alpha-beta"
    attention_constant: bool = False


PAPER_EPSILON = 1e-9


@dataclass(frozen=True)
class OutputUnits:
    """Relevance at single output units: `values` [p b] at (position `tokens` [p b], unit `classes` [p b])."""

    tokens: Tensor
    classes: Tensor
    values: Tensor

    def dense(self, shape: torch.Size) -> Tensor:
        """The relevance as a tensor [p b t n], for outputs of `shape` [b t n]."""
        relevance = self.values.new_zeros(len(self.values), *shape)
        p, b = (torch.arange(n, device=relevance.device) for n in self.values.shape)
        relevance[p[:, None], b[None], self.tokens, self.classes] = self.values
        return relevance


def absolute_total(relevance: Tensor, sentences: int) -> Tensor:
    """Σ|relevance| [p b] of every explained position and sentence, from relevance [p …]."""
    return relevance.abs().reshape(len(relevance), sentences, -1).sum(dim=-1)


def _scale(relevance: Tensor, factor: Tensor) -> Tensor:
    """The relevance [p …] multiplied by a factor [p b] per sentence."""
    p, b = factor.shape
    return (relevance.reshape(p, b, -1) * factor[..., None]).view(relevance.shape)


def _ratio(target: Tensor, actual: Tensor) -> Tensor:
    """target / actual, without a stabiliser, and 1 where actual is 0."""
    return torch.where(actual > 0, target / actual.clamp(min=torch.finfo(actual.dtype).tiny), 1)


class VoitaRules:
    """The rules of one version: each maps the relevance [p …] of an operation's output to that of its inputs.

    Inputs have the shapes without `p`. Totals are per sentence, as if each of the `sentences` went through the program
    alone. `block` is the largest size in bytes of an attention's intermediates. With `paper` or `signed` (eps mode)
    relevance is divided by the sum of all impacts; with `paper` nothing is rescaled.
    """

    def __init__(self, settings: VoitaSettings, *, sentences: int, dtype: torch.dtype, block: int) -> None:
        self.sentences, self.dtype, self.block = sentences, dtype, block
        self.paper, self.signed = settings.version == "paper", settings.mode == "eps"
        self.epsilon = PAPER_EPSILON if self.paper else EPSILON
        core_rule = partial(core_attention, keeps_sign=self.signed, constant=settings.attention_constant)
        self.through_attention = partial(ratio_attention, epsilon=PAPER_EPSILON) if self.paper else core_rule

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The relevance of x, for x·weightᵀ + bias with weight [o i]."""
        weight, bias = self._parameters(weight, bias)
        states, at_outputs = x.to(self.dtype).flatten(0, -2), relevance.flatten(1, -2)  # [r i], [p r o]
        if not (self.paper or self.signed):
            at_inputs = through_linear(at_outputs, states, weight, bias, keeps_sign=False)
        else:  # linear in the impacts, so these need not be computed
            ratio = at_outputs / stabilize(torch.nn.functional.linear(states, weight, bias), self.epsilon)
            at_inputs = (ratio @ weight).mul_(states)
            if bias is not None:
                at_inputs.add_((ratio @ (bias / x.shape[-1]))[..., None])
        (at_inputs,) = self._by_token(at_outputs, at_inputs)
        return self._rescale(relevance, at_inputs.view(-1, *x.shape))[0]

    def unit(self, start: OutputUnits, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """`linear` for relevance of single output units."""
        p, b = start.values.shape
        batch = torch.arange(b, device=x.device).expand(p, b)
        states = x[batch, start.tokens].to(self.dtype)  # [p b i]
        weight, bias = self._parameters(weight[start.classes], None if bias is None else bias[start.classes])
        impact = weight * states if bias is None else weight * states + bias[..., None] / x.shape[-1]
        at_units = start.values[..., None]
        if self.paper:
            row = impact * (at_units / stabilize(impact.sum(dim=-1, keepdim=True), self.epsilon))
        else:
            (row,) = self._by_token(at_units, transition(impact, self.signed) * at_units)
        at_inputs = row.new_zeros(p, *x.shape)
        at_inputs[torch.arange(p, device=x.device)[:, None], batch, start.tokens] = row
        return self._rescale(at_units, at_inputs)[0]

    def norm(self, relevance: Tensor, x: Tensor, norm: NormParameters) -> Tensor:
        """The relevance of x, for a layer norm or RMS norm."""
        if self.paper:
            return relevance
        rows = relevance.flatten(1, -2), x.to(self.dtype).flatten(0, -2)
        at_inputs = through_norm(*rows, norm, self.signed).view_as(relevance)
        return self._rescale(relevance, *self._by_token(relevance, at_inputs))[0]

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        """The relevance of a and b, for a + b."""
        a, b = a.to(self.dtype), b.to(self.dtype)
        if self.paper:
            ratio = relevance / stabilize(a + b, self.epsilon)
            return self._rescale(relevance, a * ratio, b * ratio)
        left, right = transition(torch.stack([a, b], dim=-1), self.signed).unbind(dim=-1)
        parts = self._by_token(relevance, relevance * left, relevance * right)
        return [self._rescale(part, part)[0] for part in parts]

    def product(self, relevance: Tensor, a: Tensor, b: Tensor) -> list[Tensor]:
        """The relevance of a and b, for an elementwise a · b; both impacts are a·b, as J_a a = J_b b."""
        if self.paper:  # in proportion to their values
            return self.add(relevance, a, b)
        impact = (a * b).to(self.dtype)
        shares = transition(torch.stack([impact, impact], dim=-1), self.signed)[..., 0] * relevance
        return self._by_token(relevance, shares, shares)

    def mix(self, relevance: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
        """The relevance of x, for matrix · x on the last axis but one; without a bias all impacts factor."""
        x, matrix = x.to(self.dtype), matrix.to(self.dtype)
        (up, down), (x_up, x_down) = positive_and_negative(matrix), positive_and_negative(x)
        positive, negative = up @ x_up + down @ x_down, up @ x_down + down @ x_up  # sums of impacts
        if self.paper or self.signed:
            total = matrix @ x if self.paper else positive + negative
            return self._rescale(relevance, x * (matrix.mT @ (relevance / stabilize(total, self.epsilon))))[0]
        plus = relevance * (SHARE / (positive + EPSILON))
        minus = relevance * (SHARE / (negative - EPSILON))
        at_inputs = x_up * (up.mT @ plus + down.mT @ minus) + x_down * (down.mT @ plus + up.mT @ minus)
        return self._rescale(relevance, at_inputs)[0]

    def attention(self, relevance: Tensor, call: AttentionCall) -> tuple[AtInputs, Tensor, Tensor]:
        """The relevance of the inputs of a whole softmax attention, for relevance [p b h t k]; rescaled over all heads.

        Returns that of query [p b h t k], key and value [p b g s k], and its sums over values, and over queries and
        keys [p b h].
        """
        h, groups = call.query.shape[1], call.key.shape[1]
        inputs = attention_inputs(call, self.dtype)
        at_inputs = self.through_attention(relevance.flatten(1, 2), inputs, self.block)
        parts = self._rescale(relevance, *(by_head(part, h) for part in at_inputs if part is not None))
        *qk_shares, value_share = (part.sum(dim=(-1, -2)) for part in parts)  # [p b h]
        value = self._sum_groups(parts[-1], groups)
        if not qk_shares:
            return (None, None, value), value_share, torch.zeros_like(value_share)
        key = self._sum_groups(parts[1], groups)
        return (parts[0], key, value), value_share, qk_shares[0] + qk_shares[1]

    def gather(self, parts: list[Tensor]) -> Tensor:
        """Sum the relevance that reached one tensor on several paths, rescaled to the total of the paths."""
        total = torch.stack(parts).sum(dim=0)
        if self.paper:
            return total
        absolute_sum = sum((absolute_total(part, self.sentences) for part in parts), torch.zeros((), dtype=total.dtype))
        return _scale(total, _ratio(absolute_sum, absolute_total(total, self.sentences)))

    def joint(self, total: Tensor, query_relevance: Tensor, memory_relevance: Tensor) -> Tensor:
        """The factor [p b] by which a cross attention's sublayer keeps the `total` [p b] over its two inputs."""
        if self.paper:
            return torch.ones_like(total)
        at_query, at_memory = (absolute_total(part, self.sentences) for part in (query_relevance, memory_relevance))
        return _ratio(total, at_query + at_memory)

    def _parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias in the dtype of the rules; no bias in the paper's, which does not count it."""
        return weight.to(self.dtype), bias.to(self.dtype) if bias is not None and not self.paper else None

    def _by_token(self, reference: Tensor, *parts: Tensor) -> list[Tensor]:
        """The parts [p … d] rescaled by one factor per token to the absolute total of the reference."""
        if self.paper:
            return list(parts)
        size = sum(part.abs().sum(dim=-1, keepdim=True) for part in parts) + self.epsilon
        factor = reference.abs().sum(dim=-1, keepdim=True) / size
        return [part * factor for part in parts]

    def _rescale(self, reference: Tensor, *parts: Tensor) -> list[Tensor]:
        """The parts rescaled by one factor per sentence to the absolute total of the reference."""
        if self.paper:
            return list(parts)
        size = sum(absolute_total(part, self.sentences) for part in parts) + self.epsilon
        return [_scale(part, absolute_total(reference, self.sentences) / size) for part in parts]

    def _sum_groups(self, relevance: Tensor, groups: int) -> Tensor:
        """Sum relevance [p b h s k] over the query heads of each group: [p b g s k]."""
        if relevance.shape[2] == groups:
            return relevance
        return self.gather(list(by_group(relevance, groups).unbind(dim=3)))
