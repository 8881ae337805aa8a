"""The network that says how responsible each expert is, and the mean over positions that it reads.

Peng, Schwartz, Li and Smith 2020, "A Mixture of h − 1 Heads is Better than h Heads", §2.3 and appendix A.
Axes beyond the usual legend: `p` positions that have a gate of their own (1 where the whole sentence shares
one, t in a causal stack), `e` experts.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headscope.errors import ConfigError
from headscope.model.mixing.base import Queries

NORMS = ("batch", "layer", "none")


def masked_mean(queries: Queries, *, window: int = 0) -> tuple[Tensor, Tensor]:
    """Means of real states [b p d], and which of them have a real position [b p].

    Position t of a causal stack averages what stands at t and before it, with `window` w the last w positions
    only; otherwise the sentence has one mean. Padding never counts. With `queries.memory` the positions of
    earlier steps of incremental decoding count too, and what later steps need is left there.
    """
    states = queries.states
    real = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    real = real if queries.real is None else queries.real.bool()
    weight = real[..., None].to(states.dtype)  # [b t 1]
    if not queries.causal:
        mean = (states * weight).sum(1, keepdim=True) / weight.sum(1, keepdim=True).clamp_min(1)
        return mean, torch.ones_like(real[:, :1])
    real_states = states * weight
    total, count = (_within if window else _so_far)(real_states, weight, queries.memory, window)
    return (total / count.clamp_min(1)).to(states.dtype), real


def _so_far(states: Tensor, weight: Tensor, memory: dict[str, Tensor] | None, _: int) -> tuple[Tensor, Tensor]:
    """Running sums [b t d] and counts [b t 1]; in float32 at least, as sums over long texts need it."""
    exact = torch.float32 if states.dtype in (torch.float16, torch.bfloat16) else states.dtype
    total, count = states.to(exact).cumsum(dim=1), weight.to(exact).cumsum(dim=1)
    if memory is not None:
        if "total" in memory:
            total, count = total + memory["total"], count + memory["count"]
        memory["total"], memory["count"] = total[:, -1:], count[:, -1:]
    return total, count


def _within(states: Tensor, weight: Tensor, memory: dict[str, Tensor] | None, window: int) -> tuple[Tensor, Tensor]:
    """Sums and counts of the last `window` positions: differences of running sums, so in float64."""
    t = states.shape[1]
    summands = torch.cat([states, weight], dim=-1)  # [b t d+1]
    if memory is not None:
        if "recent" in memory:
            summands = torch.cat([memory["recent"], summands], dim=1)
        memory["recent"] = summands[:, max(summands.shape[1] - window + 1, 0) :]
    sums = summands.double().cumsum(dim=1)
    if sums.shape[1] > window:
        sums = torch.cat([sums[:, :window], sums[:, window:] - sums[:, :-window]], dim=1)
    return sums[:, -t:, :-1], sums[:, -t:, -1:]


class RealBatchNorm(nn.Module):
    """Batch norm of [b p d] over sentences and positions whose statistics padding does not touch.

    Where a batch has a single real position its variance is nothing; the running statistics serve then. In a causal
    stack they always serve: a batch's own would tell each position about later ones.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x: Tensor, real: Tensor, *, learning: bool, causal: bool = False) -> Tensor:
        """Normalised x; `learning`: by this batch's own statistics, which then update the running ones.

        With `causal` by the running statistics of earlier batches, which this one then updates.
        """
        rows = x[real] if learning else x[:0, 0]
        if len(rows) < 2:
            return self._by(self.running_mean, self.running_var, x)
        mean, variance = rows.mean(dim=0), rows.var(dim=0, correction=0)
        normalised = self._by(*((self.running_mean, self.running_var) if causal else (mean, variance)), x)
        with torch.no_grad():
            self.running_mean.lerp_(mean.to(self.running_mean), 0.1)
            self.running_var.lerp_(rows.var(dim=0, correction=1).to(self.running_var), 0.1)
        return normalised

    def _by(self, mean: Tensor, variance: Tensor, x: Tensor) -> Tensor:
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


class Gate(nn.Module):
    """norm → linear → tanh → dropout → linear → softmax over experts.

    The second linear layer starts at zero, so fresh gates are uniform, until `spread` draws it (the paper does not say
    how gates start). Under autocast a gate computes in its weights' type, as routers of experts do (Fedus et al. 2022,
    "Switch Transformers", §2.4): rounded to bfloat16, responsibilities near 1/8 are 0.4 % apart. Batch norm of the
    input is the paper's; in a causal stack a batch's statistics would mix positions, so running ones serve there, and
    layer norm is offered. Dropout leaves out the same units at all positions of a sentence, which in the paper has one
    gate.
    """

    def __init__(self, d_model: int, experts: int, *, hidden: int, norm: str, dropout: float) -> None:
        super().__init__()
        if norm not in NORMS:
            raise ConfigError(f"norm of the gate is {norm!r}; it must be one of {', '.join(NORMS)}")
        if hidden < 1 or not 0 <= dropout < 1:
            raise ConfigError(f"gate of {hidden} hidden units with dropout {dropout}; give at least 1, and 0 ≤ p < 1")
        self.batch_norm = RealBatchNorm(d_model) if norm == "batch" else None
        self.layer_norm = nn.LayerNorm(d_model) if norm == "layer" else None
        self.inner, self.outer = nn.Linear(d_model, hidden), nn.Linear(hidden, experts)
        self.dropout = dropout
        with torch.no_grad():
            nn.init.xavier_uniform_(self.inner.weight)
            for fixed in (self.inner.bias, self.outer.weight, self.outer.bias):
                fixed.zero_()

    def spread(self, scale: float) -> None:
        """Draw the second layer's weights from Glorot's uniform distribution, times `scale`."""
        nn.init.xavier_uniform_(self.outer.weight, gain=scale)

    def forward(self, x: Tensor, real: Tensor, *, learning: bool, causal: bool = False) -> Tensor:
        """Log responsibilities [b p e] of means x [b p d]; `learning`: with dropout and the batch's own statistics."""
        with torch.autocast(x.device.type, enabled=False):
            x = x.to(self.outer.weight.dtype)
            if self.batch_norm is not None:
                x = self.batch_norm(x, real, learning=learning, causal=causal)
            elif self.layer_norm is not None:
                x = self.layer_norm(x)
            inner = torch.tanh(self.inner(x))
            if learning and self.dropout:
                inner = inner * nn.functional.dropout(torch.ones_like(inner[:, :1]), self.dropout)
            return torch.log_softmax(self.outer(inner), dim=-1)
