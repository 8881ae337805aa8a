"""How alike the heads of a layer are: cosine and L2 of contexts, linear CKA, Jensen–Shannon of weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from headscope.accumulate import Array, Estimate, Ratio, interval
from headscope.analysis import Analysis, Column, Findings, Heads, Tally, analysis
from headscope.heads import Site


@analysis
class Similarity(Analysis):
    """Mean over tokens of cosine and L2 distance between heads' contexts, and linear CKA.

    Contexts are those of counted queries (special tokens left out), before mixing and the output
    projection. Cosine is the mean over tokens of cos(c_i, c_j) (Li et al. 2018, disagreement on outputs),
    L2 the mean of ‖c_i − c_j‖, both per token (the MHR fork flattens whole sentences). CKA (Kornblith et
    al. 2019, linear) compares centred contexts over the whole corpus, from one [d d] moment matrix a layer;
    its interval resamples 16 folds of the corpus (fewer where the matrices are large).
    """

    name = "similarity"
    order = 110
    summary = "cosine, L2 and linear CKA between the contexts of a layer's heads"

    def observe(self, heads: Heads) -> Mapping[str, Ratio]:  # noqa: D102
        context = heads.context if heads.context.dtype == torch.float64 else heads.context.float()
        b, h, t, k = context.shape
        context = context * heads.queries[:, None, :, None]  # [b h t k], zero where not counted
        count = heads.queries.sum(dim=-1).to(context.dtype)[:, None, None]  # [b 1 1]
        unit = torch.nn.functional.normalize(context, dim=-1).reshape(b, h, t * k)
        tokens = context.transpose(1, 2)[heads.queries]  # [n h k]
        spread = torch.zeros(b, t, h, h, dtype=context.dtype, device=context.device)
        spread[heads.queries] = pairwise_l2(tokens)
        flat = tokens.reshape(len(tokens), h * k)  # [n d]
        return {
            "cosine": Ratio(unit @ unit.transpose(1, 2), count),
            "l2": Ratio(spread.sum(dim=1), count),
            "moments": Ratio((flat.T @ flat)[None], flat.sum(dim=0)[None, None], whole=True),
            "tokens": Ratio(count.sum()[None], count.new_ones(1), whole=True),
        }

    def report(self, tally: Tally) -> Findings:  # noqa: D102
        findings = Findings()
        columns: dict[str, dict[tuple[Site, int], Estimate]] = {"similarity_cosine": {}, "similarity_cka": {}}
        for place in tally.places("cosine"):
            heads = tally.kept("cosine", place).total.shape[1]
            cosine, l2 = tally.ratio("cosine", *place), tally.ratio("l2", *place)
            samples = cka_samples(tally, place, heads)
            for measure, estimate in {"cosine": cosine, "l2": l2, "cka": interval(samples)}.items():
                findings.arrays.update(matrices(place, measure, estimate))
            total, count = tally.bootstrap.sums(tally.kept("cosine", place))
            columns["similarity_cosine"][place] = interval(mean_of_others(total / count))
            columns["similarity_cka"][place] = interval(mean_of_others(samples))
        findings.columns = [Column(name, estimates) for name, estimates in columns.items()]
        return findings


@analysis
class JensenShannon(Analysis):
    """Mean over queries of the Jensen–Shannon divergence between two heads' weights, in nats (Clark et al. 2019, §6).

    Costs a map of weights per pair of heads, so it runs only when asked for. Special tokens are left out
    as queries; the divergence runs over whole rows.
    """

    name = "similarity.js"
    order = 111
    summary = "Jensen–Shannon divergence between the weights of a layer's heads (costs H² maps)"
    default = False

    def observe(self, heads: Heads) -> Mapping[str, Ratio]:  # noqa: D102
        weights = heads.weights.float().transpose(1, 2)[heads.queries]  # [n h s]
        n, h, _ = weights.shape
        own = torch.special.entr(weights).sum(dim=-1)  # [n h]
        pairs = torch.combinations(torch.arange(h), r=2, with_replacement=True).to(weights.device)  # [p 2]
        found = torch.zeros(n, h, h, device=weights.device)
        for chunk in torch.split(pairs, max(1, 2**24 // max(1, weights[:, 0].numel()))):
            i, j = chunk.T
            middle = torch.special.entr((weights[:, i] + weights[:, j]) / 2).sum(dim=-1)  # [n p]
            found[:, i, j] = found[:, j, i] = (middle - (own[:, i] + own[:, j]) / 2).clamp(min=0)
        b = len(heads.queries)
        row = heads.queries.nonzero(as_tuple=True)[0]  # [n]
        total = torch.zeros(b, h, h, device=weights.device).index_add_(0, row, found)
        return {"js": Ratio(total, heads.queries.sum(dim=-1).float()[:, None, None])}

    def report(self, tally: Tally) -> Findings:  # noqa: D102
        findings = Findings()
        for place in tally.places("js"):
            findings.arrays.update(matrices(place, "js", tally.ratio("js", *place)))
        return findings


def pairwise_l2(tokens: Tensor) -> Tensor:
    """‖c_i − c_j‖ for contexts [n h k]: [n h h]."""
    return torch.cdist(tokens, tokens, compute_mode="donot_use_mm_for_euclid_dist")


def cka_samples(tally: Tally, place: tuple[Site, int], heads: int) -> Tensor:
    """CKA of the whole corpus, then of each replicate: [1+r h h]."""
    kept, counts = tally.kept("moments", place), tally.kept("tokens", place)
    while counts.groups > kept.groups:
        counts.halve()
    draws = tally.bootstrap.draws(kept.used)
    draws = torch.cat([torch.ones(1, kept.used, dtype=draws.dtype), draws])  # [1+r f]
    used = slice(0, kept.used)
    return cka(kept.total[used], kept.count[used, 0], counts.total[used], draws, heads=heads)


def cka(moments: Tensor, sums: Tensor, tokens: Tensor, draws: Tensor, *, heads: int) -> Tensor:
    """Linear CKA between heads, for every way of drawing folds: [r h h].

    moments [f d d] and sums [f d] of the contexts of each fold, tokens [f]; draws [r f] says how often
    each fold counts. CKA is ‖X_iᵀX_j‖²_F / (‖X_iᵀX_i‖_F ‖X_jᵀX_j‖_F) with X centred over all that was drawn
    (Kornblith et al. 2019, §3). The squared norms are polynomials in the draws, so that only products
    between folds are formed, never a [d d] matrix for each draw.
    """
    f, d, _ = moments.shape
    mean = sums.sum(dim=0) / tokens.sum()  # [d]
    shift = sums[:, :, None] * mean
    centred = moments - shift - shift.transpose(1, 2) + tokens[:, None, None] * mean[:, None] * mean
    rest = (sums - tokens[:, None] * mean).view(f, heads, d // heads)  # [f h k], small
    blocks = centred.view(f, heads, d // heads, heads, d // heads)  # [f h k h k]
    flat = blocks.permute(1, 3, 0, 2, 4).reshape(heads, heads, f, -1)  # [h h f k·k]
    square = flat @ flat.transpose(-1, -2)  # [h h f f]
    cubic = torch.einsum("aik,bikjl,cjl->ijabc", rest, blocks, rest)  # [h h f f f]
    found = []
    for part in torch.split(draws, 64):
        n = (part @ tokens)[:, None, None]  # [r 1 1]
        size = torch.tensordot(part, rest, 1).square().sum(dim=-1)  # [r h]
        norm = torch.einsum("ijra,ra->rij", part @ square, part)
        cross = torch.einsum("ijarb,ra,rb->rij", (cubic @ part.T).transpose(-1, -2), part, part)
        found.append(norm - 2 * cross / n + size[:, :, None] * size[:, None, :] / n**2)
    squared = torch.cat(found).clamp(min=0)  # [r h h]
    own = squared.diagonal(dim1=1, dim2=2)  # [r h]
    return squared / (own[:, :, None] * own[:, None, :]).sqrt()


def mean_of_others(matrices: Tensor) -> Tensor:
    """Mean over the other heads of the layer of matrices [r h h]: [r h]; NaN for a layer of one head."""
    heads = matrices.shape[-1]
    own = matrices.diagonal(dim1=1, dim2=2)
    return (matrices.sum(dim=-1) - own) / (heads - 1) if heads > 1 else torch.full_like(own, torch.nan)


def matrices(place: tuple[Site, int], measure: str, estimate: Estimate) -> dict[str, Array]:
    """A [h h] estimate as entries of similarity.npz: `site/layer/measure`, `…_low`, `…_high`."""
    key = f"{place[0]}/{place[1]}/{measure}"
    return {key: estimate.value, f"{key}_low": estimate.low, f"{key}_high": estimate.high}
