"""Losses: label-smoothed cross-entropy in chunks, the growth of mixing matrices, and the disagreement of heads.

- Cross-entropy of decoder states: logits of all positions are never in memory together.
- Growth (Azov & Landau, MHR): for a matrix A with nuclear norm n the published term is sg(n) + radius - n, where sg
  stops the gradient. Its value is always the radius, its gradient that of -n, so the radius does not affect training.
  The gradient of -n is -U·Vᵀ for A = U·Σ·Vᵀ, whose size does not depend on A: without a cap the norm grows forever.
- Disagreement: the similarity of the contexts of a module's heads (Li et al. 2018, "Multi-Head Attention with
  Disagreement Regularization", §3.2, on outputs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headscope.data.vocabulary import Vocabulary
from headscope.errors import ConfigError, flag
from headscope.heads import Site
from headscope.model.attention import precise, precise_type
from headscope.model.native.transformer import Transformer

CELLS = 1 << 20  # logits that are in memory at a time


class Sums(NamedTuple):
    """Sums over target tokens: the criterion (with extra losses), -log p in nats, and numbers of tokens, sentences."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    sentences: int = 0

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        tokens, sentences = self.tokens + other.tokens, self.sentences + other.sentences
        return Sums(self.loss + other.loss, self.nll + other.nll, tokens, sentences)


def smoothed_cross_entropy(
    states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Σ over positions of (1 - ε)·(-log p_label) + (ε / V)·Σ_v (-log p_v), and Σ -log p_label without gradient.

    states [n d] before the output projection weight [V d] (+ bias [V]), labels [n]; ε is `smoothing`, which is spread
    over all tokens, the label included (Szegedy et al. 2016; early fairseq and the MHR fork; later fairseq gives
    1 - ε to the label and ε / (V - 1) to each other token). The forward pass computes logits chunk by chunk, and from
    each chunk its part of the first sum's gradients.
    """
    return _Smoothed.apply(states, weight, bias, labels, smoothing)  # type: ignore[no-untyped-call]


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        device = states.device.type
        is_bfloat16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
        dtype = torch.bfloat16 if is_bfloat16 else precise_type(states.dtype)  # in float16 small gradients would vanish
        x, w, rows = states.to(dtype), weight.to(dtype), max(CELLS // len(weight), 1)
        b = None if bias is None else bias.to(dtype)
        states_gradient, weight_gradient = torch.empty_like(x), torch.zeros_like(weight)
        bias_gradient = None if bias is None else torch.zeros_like(bias)
        sums = torch.zeros(2, dtype=precise_type(dtype), device=x.device)
        chunks = zip(x.split(rows), labels.split(rows), states_gradient.split(rows), strict=True)
        with torch.autocast(device, enabled=False):
            for chunk, chunk_labels, chunk_gradient in chunks:
                logits = precise(torch.nn.functional.linear(chunk, w, b))  # [rows V]
                sums += _sums_and_gradient(logits, chunk_labels, smoothing)  # logits are their gradient now
                logits_gradient = logits.to(dtype)
                torch.mm(logits_gradient, w, out=chunk_gradient)
                weight_gradient += logits_gradient.t() @ chunk
                if bias_gradient is not None:
                    bias_gradient += logits.sum(dim=0)
        ctx.save_for_backward(states_gradient.to(states.dtype), weight_gradient, bias_gradient)
        loss, nll = sums.clone().unbind()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *of_outputs: Tensor) -> tuple[Tensor | None, ...]:
        factor = of_outputs[0]  # the gradient of the loss by the first sum; the second sum has none
        gradients = [None if part is None else part * factor.to(part.dtype) for part in ctx.saved_tensors]
        return *gradients, None, None


def _sums_and_gradient(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Both sums [2] of logits [n V], which are overwritten by the gradient of the first sum."""
    index = labels[:, None]
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    label, mean = logits.gather(1, index), logits.mean(dim=-1, keepdim=True) if smoothing else 0.0
    total = logits.exp_().sum(dim=-1, keepdim=True)
    log_total = total.log()
    nll, mean_nll = (log_total - label).sum(), (log_total - mean).sum()
    logits.div_(total).sub_(smoothing / logits.shape[1])
    logits.scatter_add_(1, index, torch.full_like(index, -(1 - smoothing), dtype=logits.dtype))
    return torch.stack([(1 - smoothing) * nll + smoothing * mean_nll, nll])


FORK_SENTENCES, FORK_EPOCHS, FORK_FIRST_EPOCHS = 160239, 40, 50  # the fork assumes this size for any run


def nuclear_norms(alphas: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the singular values of each matrix [h h]; its gradient is U·Vᵀ, at repeated singular values too."""
    norms = dict[int, Tensor]()
    for size in {len(alpha) for alpha in alphas}:  # matrices of one size in one batch, which is fastest
        numbers = [number for number, alpha in enumerate(alphas) if len(alpha) == size]
        matrices = precise(torch.stack([alphas[number] for number in numbers]))  # [n h h]
        norms.update(zip(numbers, torch.linalg.svdvals(matrices).sum(dim=-1).unbind(), strict=True))
    return [norms[number] for number in range(len(alphas))]


def growth_loss(
    alphas: Mapping[Site, Sequence[Tensor]],
    *,
    gamma: float,
    ratios: Mapping[Site, float],
    radius: float = 0.0,
    cap: float | None = None,
) -> Tensor:
    """gamma · Σ over sites of ratio · Σ over matrices of (sg(n) + radius - n), n the nuclear norm.

    A sum over layers, as in the fork. A matrix whose n has reached `cap` · h (n is h at the identity) has gradient 0.
    Sites with ratio 0 have no term.
    """
    sites = [site for site, site_matrices in alphas.items() if site_matrices and ratios.get(site, 0.0)]
    matrices = [alpha for site in sites for alpha in alphas[site]]
    weights = [ratios[site] for site in sites for _ in alphas[site]]
    total = torch.zeros((), device=matrices[0].device if matrices else None)
    for alpha, weight, norm in zip(matrices, weights, nuclear_norms(matrices), strict=True):
        value = norm.detach()
        growing_norm = norm if cap is None or float(value) < cap * len(alpha) else value
        total = total + gamma * weight * (value + radius - growing_norm)
    return total


def off_diagonal(alpha: Tensor) -> float:
    """Σ_{i≠j} |a_ij| / Σ |a_ij| of a mixing matrix [h h]; 0 at the identity."""
    size = alpha.detach().abs()
    return float(1 - size.diagonal().sum() / size.sum())


def fork_open(sentences: int, start_after: float | None, *, first_of_epoch: bool) -> bool:
    """Whether the fork applies its loss to a batch before which `sentences` were read.

    It does so after the share `start_after` (None: 1) of the training, which it assumes to be 40 epochs of 160,239
    sentences; for the first batch of an epoch 50 epochs, so that one batch may still be before the start.
    """
    epochs = FORK_FIRST_EPOCHS if first_of_epoch else FORK_EPOCHS
    return 1 - sentences / (FORK_SENTENCES * epochs) < 1 - (1.0 if start_after is None else start_after)


def mean_cosine(context: Tensor, real: Tensor) -> Tensor:
    """The mean over `real` positions [b t] of (1/h²) Σ_ij cos(z_i, z_j), for contexts z [b h t k].

    Pairs i = j count, as in the paper, so it is from 0 to 1, and 1 where all heads give the same. With unit vectors u
    the double sum is ‖Σ_i u_i‖².
    """
    unit = torch.nn.functional.normalize(context, dim=-1)
    similarity = unit.sum(dim=1).square().sum(dim=-1) / context.shape[1] ** 2  # [b t]
    weight = real.to(similarity.dtype)
    return (similarity * weight).sum() / weight.sum().clamp_min(1)


def fork_total(context: Tensor) -> Tensor:
    """The MHR fork's loss of a module: Σ over b, i, j of (1 + cos_b(i, j)) / (h XOR 2), not divided by b.

    A head's vector is that of the whole sentence with padding. The fork's `H^2` is h XOR 2, which is zero for two
    heads: ConfigError there.
    """
    b, h = context.shape[:2]
    if h ^ 2 == 0:
        raise ConfigError(f"the fork's cosine loss divides by heads XOR 2, 0 for 2 heads; take {flag.compat} none")
    flat = context.flatten(2)  # [b h t·k]
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    total: Tensor = b * h * h + unit.sum(dim=1).square().sum()
    return total / (h ^ 2)


def fork_loss(encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor]) -> Tensor:
    """The sum over sites of the mean over layers of `fork_total`, for contexts [b h t k] of every layer."""
    parts = [
        torch.stack([fork_total(context) for context in contexts]).mean()
        for contexts in (encoder, decoder, cross)
        if contexts
    ]
    return torch.stack(parts).sum()


def pad_like_the_fork(model: Transformer, source: Vocabulary | None, target: Vocabulary, *, fresh: bool) -> None:
    """Freeze the embedding of padding on either side; in a `fresh` model set it to 0.

    Where the table is also the output projection, its row still learns as a word of the output.
    """
    for stack, vocabulary in ((model.encoder, source), (model.decoder, target)):
        if stack is not None and vocabulary is not None:
            table, pad = stack.embeddings.tokens, vocabulary.padding
            table.padding_idx = pad
            if fresh:
                with torch.no_grad():
                    table.weight[pad] = 0
