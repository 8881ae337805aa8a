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
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headscope.data.vocabulary import Vocabulary
from headscope.errors import ConfigError, flag
from headscope.heads import Site
from headscope.model.attention import precise
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
    1 - ε to the label and ε / (V - 1) to each other token). Logits are made chunk by chunk, again in the backward pass.
    """
    rows = max(CELLS // len(weight), 1)
    chunks = zip(states.split(rows), labels.split(rows), strict=True)
    of_chunk = partial(checkpoint, _chunk_sums, use_reentrant=False, preserve_rng_state=False)
    loss, nll = zip(
        *(of_chunk(part, weight, bias, part_labels, smoothing) for part, part_labels in chunks), strict=True
    )
    return torch.stack(loss).sum(), torch.stack(nll).sum()


def _chunk_sums(
    states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
) -> tuple[Tensor, Tensor]:
    log_p = precise(torch.nn.functional.linear(states, weight, bias)).log_softmax(dim=-1)
    nll = torch.nn.functional.nll_loss(log_p, labels, reduction="sum")
    return (1 - smoothing) * nll - smoothing * log_p.mean(dim=-1).sum() if smoothing else nll, nll.detach()


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
