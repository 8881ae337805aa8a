"""The rule as the paper itself states it (Voita et al. 2019, appendix A; after Ding et al. 2017), "version P".

A neuron's relevance goes to what it is made of by contribution ratios: W_uv u / Σ_u' W_u'v u' for weighted sums,
u / Σ_u' u' for products, unchanged through activations. Nothing is rescaled. The paper states no stabiliser and leaves
some choices open; here

- biases take no part in the ratios, so a weighted sum conserves relevance;
- norms and softmax hand relevance on unchanged, like activations;
- weights·V and query·key are sums of products, queries having been scaled first;
- denominators get ε = 1e-9 with their sign, so that 0 / 0 is 0.

Ratios are signed and have no bound where a denominator passes near zero: numbers of this rule are rough in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headscope.relevance.voita import attention as voita_attention
from headscope.relevance.voita.attention import AttentionInputs
from headscope.relevance.voita.blocks import stabilised
from headscope.relevance.voita.trace import Core
from headscope.relevance.voita.trace_functions import NormDetail
from headscope.relevance.voita.trace_walk import CoreRelevance, Units, WalkRules

EPSILON = 1e-9


class PaperRules(WalkRules):
    """Version P. `block` is the number of bytes that an intermediate of an attention may take."""

    def __init__(self, *, dtype: torch.dtype, block: int) -> None:
        self.dtype, self.block = dtype, block

    def linear(self, relevance: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight = x.to(self.dtype), weight.to(self.dtype)
        return x * (_over(relevance, x @ weight.T) @ weight)

    def unit(self, start: Units, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        p, b = start.values.shape
        batch = torch.arange(b, device=x.device).expand(p, b)
        impact = weight[start.classes].to(self.dtype) * x[batch, start.tokens].to(self.dtype)  # [p b i]
        found = impact.new_zeros(p, *x.shape)
        first = torch.arange(p, device=x.device)[:, None]
        found[first, batch, start.tokens] = impact * _over(start.values, impact.sum(dim=-1))[..., None]
        return found

    def norm(self, relevance: Tensor, x: Tensor, norm: NormDetail) -> Tensor:
        """Unchanged."""
        return relevance

    def add(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a, b = a.to(self.dtype), b.to(self.dtype)
        part = _over(relevance, a + b)
        return part * a, part * b

    def product(self, relevance: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """In proportion to the factors themselves."""
        return self.add(relevance, a, b)

    def mix(self, relevance: Tensor, matrix: Tensor, x: Tensor) -> Tensor:
        matrix, x = matrix.to(self.dtype), x.to(self.dtype)
        return x * (matrix.mT @ _over(relevance, matrix @ x))

    def attention(self, relevance: Tensor, core: Core) -> CoreRelevance:
        h, groups = core.call.query.shape[1], core.call.key.shape[1]
        its = voita_attention.attention_inputs(core.call, self.dtype)
        parts = [voita_attention.by_head(part, h) for part in _ratios(relevance.flatten(1, 2), its, self.block)]
        sums = [part.sum(dim=(-1, -2)) for part in parts]
        key, value = (voita_attention.by_group(part, groups).sum(dim=3) for part in parts[1:])
        return CoreRelevance(parts[0], key, value, sums[2], sums[0] + sums[1])

    def gather(self, parts: list[Tensor]) -> Tensor:
        """The sum."""
        return torch.stack(parts).sum(dim=0)

    def joint(self, total: Tensor, own: Tensor, memory: Tensor) -> Tensor:
        """Nothing is scaled."""
        return torch.ones_like(total)


def _over(relevance: Tensor, total: Tensor) -> Tensor:
    return relevance / stabilised(total, EPSILON)


def _ratios(relevance: Tensor, its: AttentionInputs, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Relevance [p n t c] at queries, keys and values, block of queries by block."""
    p, n = relevance.shape[:2]
    queries = relevance.new_zeros(p, n, *its.query.shape[1:])
    keys = relevance.new_zeros(p, n, *its.key.shape[1:])
    values = relevance.new_zeros(p, n, *its.value.shape[1:])
    for rows in voita_attention.blocks(relevance, its, block):
        part = its.rows(rows)
        given = _over(relevance[:, :, rows], part.context)
        weights, value = part.weights[:, :, None], part.value.mT[:, None]  # [n t 1 s], [n 1 c s]
        to_weights, to_values = _product_shares(weights, value)  # [n t c s]
        values += torch.einsum("pntc,ntcs->pnsc", given, to_values)
        at_scores = torch.einsum("pntc,ntcs->pnts", given, to_weights)
        given = _over(at_scores, part.query @ part.key.mT)
        to_queries, to_keys = _product_shares(part.query[..., None], part.key.mT[:, None])  # [n t e s]
        queries[:, :, rows] = torch.einsum("pnts,ntes->pnte", given, to_queries)
        keys += torch.einsum("pnts,ntes->pnse", given, to_keys)
    return queries, keys, values


def _product_shares(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """What a product a·b gives to each of its factors: a·b · a / (a + b), a·b · b / (a + b)."""
    part = _over(a * b, a + b)
    return part * a, part * b
