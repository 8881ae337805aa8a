"""The rules of Voita et al.'s program as first published in June 2019 ("version A").

α = 1, β = 0, ε = 1e-7, inputs shifted to x' = x + ε: R_x = x' · ∂f(x')/∂x · R_y / f(x'), with max(W, ε) for the
weights of linear maps and without their biases. Norms hand relevance on unchanged. After every operation absolute
values are taken and scaled to the sum that came in. The authors ask readers to use the later version.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.relevance.voita import attention as voita_attention
from headscope.relevance.voita.attention import AttentionInputs
from headscope.relevance.voita.trace import Core
from headscope.relevance.voita.trace_functions import NormDetail
from headscope.relevance.voita.trace_walk import CoreRelevance, Units, WalkRules
from headscope.relevance.voita.voita_rules import absolute, scaled

EPSILON = 1e-7


class FirstRules(WalkRules):
    """Version A for `sentences` sentences; totals are per sentence. Everything factors: nothing is built in blocks."""

    def __init__(self, *, sentences: int, dtype: torch.dtype) -> None:
        self.sentences, self.dtype = sentences, dtype

    def _shifted(self, *tensors: Tensor) -> list[Tensor]:
        return [tensor.to(self.dtype) + EPSILON for tensor in tensors]

    def _positive(self, reference: Tensor, *parts: Tensor) -> list[Tensor]:
        """|parts|, scaled together to the sum of the reference, per sentence."""
        found = sum(absolute(part, self.sentences) for part in parts) + EPSILON
        wanted = reference.reshape(len(reference), self.sentences, -1).sum(dim=-1)
        return [scaled(part.abs(), wanted / found) for part in parts]

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (x,) = self._shifted(x)
        weight = weight.to(self.dtype).clamp(min=EPSILON)
        found = x * ((relevance / (x @ weight.T)) @ weight)
        return self._positive(relevance, found)[0]

    def unit(self, start: Units, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        p, b = start.values.shape
        batch = torch.arange(b, device=x.device).expand(p, b)
        (states,) = self._shifted(x[batch, start.tokens])  # [p b i]
        impact = weight[start.classes].to(self.dtype).clamp(min=EPSILON) * states
        row = impact * (start.values / impact.sum(dim=-1))[..., None]
        found = row.new_zeros(p, *x.shape)
        found[torch.arange(p, device=x.device)[:, None], batch, start.tokens] = row
        return self._positive(start.values[..., None], found)[0]

    def norm(self, relevance: Tensor, x: Tensor, norm: NormDetail) -> Tensor:
        """Unchanged."""
        return relevance

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self._shifted(a, b)
        ratio = relevance / (a + b)
        first, second = self._positive(relevance, a * ratio, b * ratio)
        return first, second

    def product(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """x · ∂f/∂x / f is one for both factors: half each after scaling. The program has no such operation."""
        first, second = self._positive(relevance, relevance, relevance)
        return first, second

    def mix(self, relevance: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
        """As a linear map: max(matrix, ε). The program has no such operation."""
        (x,) = self._shifted(x)
        matrix = matrix.to(self.dtype).clamp(min=EPSILON)
        return self._positive(relevance, x * (matrix.mT @ (relevance / (matrix @ x))))[0]

    def attention(self, relevance: Tensor, core: Core) -> CoreRelevance:
        """Gradient times input over output, for the whole attention at once."""
        h, groups = core.call.query.shape[1], core.call.key.shape[1]
        found = _gradients(relevance.flatten(1, 2), voita_attention.attention_inputs(core.call, self.dtype))
        parts = self._positive(relevance, *(voita_attention.by_head(part, h) for part in found))
        sums = [part.sum(dim=(-1, -2)) for part in parts]
        key, value = (voita_attention.by_group(part, groups).sum(dim=3) for part in parts[1:])
        return CoreRelevance(parts[0], key, value, sums[2], sums[0] + sums[1])

    def gather(self, parts: list[Tensor]) -> Tensor:
        """The sum."""
        return torch.stack(parts).sum(dim=0)

    def joint(self, total: Tensor, own: Tensor, memory: Tensor) -> Tensor:
        """Nothing more is scaled."""
        return torch.ones_like(total)


def _gradients(relevance: Tensor, its: AttentionInputs) -> tuple[Tensor, Tensor, Tensor]:
    """x' · ∂o(x')/∂x · R/o(x') for x' = q, k, v shifted by ε; relevance [p n t c].

    Masks and biases of the scores are kept: the weights at x' are those at x times exp of the scores' change.
    """
    query, key, value = its.query + its.scaling * EPSILON, its.key + EPSILON, its.value + EPSILON
    change = (query @ key.mT - its.query @ its.key.mT).exp()
    total = 1 + (its.weights * (change - 1)).sum(dim=-1, keepdim=True)
    weights, slope = its.weights * change / total, its.slope * change / total
    ratio = relevance / (weights @ value)
    at_weights = ratio @ value.mT  # [p n t s]
    at_scores = slope * (at_weights - (weights * at_weights).sum(dim=-1, keepdim=True))
    return query * (at_scores @ key), key * (at_scores.mT @ query), value * (weights.mT @ ratio)
