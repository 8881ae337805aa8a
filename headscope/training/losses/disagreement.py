"""How alike the contexts of a module's heads are, as a loss (Li et al. 2018, "Multi-Head Attention with
Disagreement Regularization", §3.2, on outputs)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.errors import ConfigError
from headscope.model.native.transformer import Transformer


def mean_cosine(context: Tensor, real: Tensor | None) -> Tensor:
    """Mean over real positions of (1/h²) Σ_ij cos(z_i, z_j) for contexts z [b h t k]; real [b t], None: all.

    The pairs i = j are part of it, as in the paper: between 0 and 1, and 1 where all heads say the same. With
    unit vectors u the double sum is ‖Σ_i u_i‖².
    """
    unit = torch.nn.functional.normalize(context, dim=-1)
    similarity = unit.sum(dim=1).square().sum(dim=-1) / context.shape[1] ** 2  # [b t]
    if real is None:
        return similarity.mean()
    weight = real.to(similarity.dtype)
    return (similarity * weight).sum() / weight.sum().clamp_min(1)


def fork_total(context: Tensor) -> Tensor:
    """The MHR fork's number of a module: Σ over b, i, j of (1 + cos_b(i, j)) / (h XOR 2), not divided by b.

    A head's vector is its whole sentence, padded positions too; h XOR 2 is what its `H^2` computes, which for
    two heads is zero: ConfigError there.
    """
    b, h = context.shape[:2]
    if h ^ 2 == 0:
        raise ConfigError("the fork's cosine loss divides by heads XOR 2, which is 0 for 2 heads; take --compat none")
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


def pad_like_the_fork(model: Transformer, pads: tuple[int, int], *, fresh: bool) -> None:
    """Padding, ids `pads` of encoder and decoder, learns nothing where it is read; a `fresh` model's begins at 0.

    It is a word of the output as any other, so its row of a table that is tied to the output does learn.
    """
    for stack, pad in zip((model.encoder, model.decoder), pads, strict=True):
        if stack is not None:
            table = stack.embeddings.tokens
            table.padding_idx = pad
            if fresh:
                with torch.no_grad():
                    table.weight[pad] = 0
