"""Label-smoothed cross-entropy of decoder states, without a vocabulary-sized tensor for all positions."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

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
    """Σ over positions of (1 - ε)·(-log p_label) + (ε / V)·Σ_v (-log p_v), and Σ -log p_label.

    states [n d] before the output projection weight [V d] (+ bias [V]), labels [n]; ε is `smoothing`, and the
    label itself has its share of it (Szegedy et al. 2016; early fairseq and the MHR fork; later fairseq gives
    1 - ε to the label and ε / (V - 1) to each other token). Logits are made chunk by chunk, and with them, in the
    forward pass, the gradients of `states`, `weight` and `bias`; only the first of the two sums has gradients.
    """
    losses: tuple[Tensor, Tensor] = _Smoothed.apply(states, weight, bias, labels, smoothing)  # type: ignore[no-untyped-call]
    return losses


class _Smoothed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float
    ) -> tuple[Tensor, Tensor]:
        kind = torch.get_autocast_dtype(states.device.type) if torch.is_autocast_enabled(states.device.type) else None
        x, w = (states, weight) if kind is None else (states.to(kind), weight.to(kind))
        needs_gradient = ctx.needs_input_grad[:3]
        of_states = torch.empty_like(x) if needs_gradient[0] else None
        of_weight = torch.zeros_like(weight) if needs_gradient[1] else None
        of_bias = torch.zeros_like(bias) if bias is not None and needs_gradient[2] else None
        sums = torch.zeros(2, dtype=torch.float64 if x.device.type == "cpu" else _wide(x), device=x.device)
        rows = max(CELLS // len(w), 1)
        for begin in range(0, len(x), rows):
            end = min(begin + rows, len(x))
            logits = torch.nn.functional.linear(x[begin:end], w, None if bias is None else bias.to(x.dtype))
            chunk, gradient = _chunk(
                logits.to(_wide(x)), labels[begin:end], smoothing, needs_gradient=any(needs_gradient)
            )
            sums += chunk
            if gradient is None:
                continue
            slope = gradient.to(x.dtype)
            if of_states is not None:
                torch.mm(slope, w, out=of_states[begin:end])
            if of_weight is not None:
                _add_product(of_weight, slope, x[begin:end])
            if of_bias is not None:
                of_bias += gradient.sum(dim=0)
        loss, nll = sums[0].to(_wide(x), copy=True), sums[1].to(_wide(x), copy=True)
        ctx.save_for_backward(of_states, of_weight, of_bias)
        ctx.kind = states.dtype
        ctx.mark_non_differentiable(nll)
        return loss, nll

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        of_states, of_weight, of_bias = ctx.saved_tensors
        slope = slopes[0]
        scaled = [
            None if gradient is None else gradient * slope.to(gradient.dtype)
            for gradient in (of_states, of_weight, of_bias)
        ]
        return None if scaled[0] is None else scaled[0].to(ctx.kind), scaled[1], scaled[2], None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunk(logits: Tensor, labels: Tensor, smoothing: float, *, needs_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """Both sums [2] of logits [n V], and their first one's gradient, for which the logits' memory is used."""
    index = labels[:, None]
    logits.sub_(logits.amax(dim=-1, keepdim=True))
    label, mean = logits.gather(1, index), logits.mean(dim=-1, keepdim=True) if smoothing else logits.new_zeros(())
    total = logits.exp_().sum(dim=-1, keepdim=True)
    lse = total.log()
    nll = (lse - label).sum()
    loss = (1 - smoothing) * nll
    if smoothing:
        loss = loss + smoothing * (lse - mean).sum()
    if not needs_gradient:
        return torch.stack([loss, nll]), None
    logits.div_(total)
    if smoothing:
        logits.sub_(smoothing / logits.shape[1])
    logits.scatter_add_(1, index, torch.full_like(index, -(1 - smoothing), dtype=logits.dtype))
    return torch.stack([loss, nll]), logits


def _add_product(total: Tensor, slope: Tensor, x: Tensor) -> None:
    """total [V d] += slopeᵀ [V n] · x [n d]."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.t(), x)
    else:
        total += torch.mm(slope.t(), x)
