"""Losses: label-smoothed cross-entropy in chunks, the growth of mixing matrices, and the disagreement of heads.

- Cross-entropy of decoder states is taken without a vocabulary-sized tensor for all positions.
- Growth (Azov & Landau, MHR): for a matrix A with nuclear norm n the published term is sg(n) + radius - n, where sg
  stops the gradient: its value is always the radius, its gradient is that of -n, and so the radius has no influence on
  training. The gradient of -n is -U·Vᵀ for A = U·Σ·Vᵀ, of the same size whatever the size of A: without a cap nothing
  holds the norm back.
- Disagreement: how alike the contexts of the heads of a module are (Li et al. 2018, "Multi-Head Attention with
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

CELLS = 1 << 20  # logits that are held at a time


class Sums(NamedTuple):
    """Sums over target tokens, as numbers: criterion (extra loss included), -log p in nats, tokens, sentences."""

    loss: float = 0.0
    nll: float = 0.0
    tokens: int = 0
    sentences: int = 0

    def plus(self, other: Sums) -> Sums:
        """Both together."""
        tokens, sentences = self.tokens + other.tokens, self.sentences + other.sentences
        return Sums(self.loss + other.loss, self.nll + other.nll, tokens, sentences)


def smoothed_cross_entropy(
    states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, *, smoothing: float
) -> tuple[Tensor, Tensor]:
    """Σ over positions of (1 - ε)·(-log p_label) + (ε / V)·Σ_v (-log p_v), and Σ -log p_label without gradient.

    states [n d] before the output projection weight [V d] (+ bias [V]), labels [n]; ε is `smoothing`, and the
    label itself has its share of it (Szegedy et al. 2016; early fairseq and the MHR fork; later fairseq gives
    1 - ε to the label and ε / (V - 1) to each other token). Logits are made chunk by chunk, and with them, in the
    forward pass, all gradients of the first sum.
    """
    return _Smoothed.apply(states, weight, bias, labels, smoothing)  # type: ignore[no-untyped-call]


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        device = states.device.type
        is_bfloat16 = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) is torch.bfloat16
        kind = torch.bfloat16 if is_bfloat16 else precise_type(states.dtype)  # in float16 small gradients would vanish
        x, w, rows = states.to(kind), weight.to(kind), max(CELLS // len(weight), 1)
        of_states, of_weight = torch.empty_like(x), torch.zeros_like(weight)
        of_bias = None if bias is None else torch.zeros_like(bias)
        sums = torch.zeros(2, dtype=precise_type(kind), device=x.device)
        with torch.autocast(device, enabled=False):
            for part, part_labels, into in zip(x.split(rows), labels.split(rows), of_states.split(rows), strict=True):
                logits = precise(torch.nn.functional.linear(part, w, None if bias is None else bias.to(kind)))
                sums += _sums_and_gradient(logits, part_labels, smoothing)
                slope = logits.to(kind)
                torch.mm(slope, w, out=into)
                of_weight += slope.t() @ part
                if of_bias is not None:
                    of_bias += logits.sum(dim=0)
        ctx.save_for_backward(of_states.to(states.dtype), of_weight, of_bias)
        loss, nll = sums.clone().unbind()
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        gradients = [None if part is None else part * slopes[0].to(part.dtype) for part in ctx.saved_tensors]
        return *gradients, None, None


def _sums_and_gradient(logits: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Both sums [2] of logits [n V], whose memory then holds the gradient of the first one."""
    index = labels[:, None]
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    label, mean = logits.gather(1, index), logits.mean(dim=-1, keepdim=True) if smoothing else 0.0
    total = logits.exp_().sum(dim=-1, keepdim=True)
    lse = total.log()
    nll, from_mean = (lse - label).sum(), (lse - mean).sum()
    logits.div_(total).sub_(smoothing / logits.shape[1])
    logits.scatter_add_(1, index, torch.full_like(index, -(1 - smoothing), dtype=logits.dtype))
    return torch.stack([(1 - smoothing) * nll + smoothing * from_mean, nll])


FORK_SENTENCES, FORK_EPOCHS, FORK_FIRST_EPOCHS = 160239, 40, 50  # what the fork takes for the size of any run


def nuclear_norms(alphas: Sequence[Tensor]) -> list[Tensor]:
    """Σ of the singular values of each matrix [h h]; the gradient is U·Vᵀ, at repeated singular values too."""
    norms = dict[int, Tensor]()
    for size in {len(alpha) for alpha in alphas}:  # together, as a device computes many small matrices best
        numbers = [number for number, alpha in enumerate(alphas) if len(alpha) == size]
        matrices = torch.stack([alphas[number] for number in numbers])
        exact = matrices if matrices.dtype == torch.float64 else matrices.float()
        norms.update(zip(numbers, torch.linalg.svdvals(exact).sum(dim=-1).unbind(), strict=True))
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

    A plain sum over layers, as the fork has it. A matrix whose n reaches `cap` · h (at the identity n is h) is
    pushed no further. Sites with ratio 0 have no term.
    """
    sites = [site for site, matrices_of_site in alphas.items() if matrices_of_site and ratios.get(site, 0.0)]
    matrices = [alpha for site in sites for alpha in alphas[site]]
    weights = [ratios[site] for site in sites for _ in alphas[site]]
    total = torch.zeros((), device=matrices[0].device if matrices else None)
    for alpha, weight, norm in zip(matrices, weights, nuclear_norms(matrices), strict=True):
        value = norm.detach()
        norm_pushed = norm if cap is None or float(value) < cap * len(alpha) else value
        total = total + gamma * weight * (value + radius - norm_pushed)
    return total


def off_diagonal(alpha: Tensor) -> float:
    """Σ_{i≠j} |a_ij| / Σ |a_ij|; 0 at the identity."""
    size = alpha.detach().abs()
    return float(1 - size.diagonal().sum() / size.sum())


def fork_open(sentences: int, start_after: float | None, *, first_of_epoch: bool) -> bool:
    """Whether the fork's window is open for a batch before which `sentences` were read.

    The fork counts against 40 epochs of 160,239 sentences, whatever the run; for the first batch of an epoch
    against 50 of them, so that one batch can fall outside again near the edge. None stands for 1.
    """
    epochs = FORK_FIRST_EPOCHS if first_of_epoch else FORK_EPOCHS
    return 1 - sentences / (FORK_SENTENCES * epochs) < 1 - (1.0 if start_after is None else start_after)


def mean_cosine(context: Tensor, real: Tensor) -> Tensor:
    """Mean over real positions [b t] of (1/h²) Σ_ij cos(z_i, z_j) for contexts z [b h t k].

    The pairs i = j are part of it, as in the paper: between 0 and 1, and 1 where all heads say the same. With
    unit vectors u the double sum is ‖Σ_i u_i‖².
    """
    unit = torch.nn.functional.normalize(context, dim=-1)
    similarity = unit.sum(dim=1).square().sum(dim=-1) / context.shape[1] ** 2  # [b t]
    weight = real.to(similarity.dtype)
    return (similarity * weight).sum() / weight.sum().clamp_min(1)


def fork_total(context: Tensor) -> Tensor:
    """The MHR fork's number of a module: Σ over b, i, j of (1 + cos_b(i, j)) / (h XOR 2), not divided by b.

    A head's vector is its whole sentence, padded positions too; h XOR 2 is what its `H^2` computes, which for
    two heads is zero: ConfigError there.
    """
    b, h = context.shape[:2]
    if h ^ 2 == 0:
        raise ConfigError(f"the fork's cosine loss divides by heads XOR 2, 0 for 2 heads; take {flag.compat} none")
    flat = context.flatten(2)  # [b h t·k]
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp_min(1e-8)
    total: Tensor = b * h * h + unit.sum(dim=1).square().sum()
    return total / (h ^ 2)


def fork_loss(encoder: Sequence[Tensor], decoder: Sequence[Tensor], cross: Sequence[Tensor]) -> Tensor:
    """Mean over layers of `fork_total` of each site, added up, for contexts [b h t k] of every layer."""
    parts = [
        torch.stack([fork_total(context) for context in contexts]).mean()
        for contexts in (encoder, decoder, cross)
        if contexts
    ]
    return torch.stack(parts).sum()


def pad_like_the_fork(model: Transformer, source: Vocabulary | None, target: Vocabulary, *, fresh: bool) -> None:
    """Padding of either side learns nothing where it is read; a `fresh` model's begins at 0.

    It is a word of the output as any other, so its row of a table that is tied to the output does learn.
    """
    for stack, vocabulary in ((model.encoder, source), (model.decoder, target)):
        if stack is not None and vocabulary is not None:
            table, pad = stack.embeddings.tokens, vocabulary.padding
            table.padding_idx = pad
            if fresh:
                with torch.no_grad():
                    table.weight[pad] = 0
