"""Propagation rules as changes of the gradient in the backward pass of one operation.

The relevance of a tensor is tensor · gradient, so a rule of layer-wise relevance propagation is another backward pass
for one kind of operation; linear operations keep their ordinary gradients:

| operation | rule | effect on the gradient g |
| --- | --- | --- |
| y = f(x), elementwise, f(0) = 0 | identity: all relevance to x | g · f(x)/x |
| normalisation | the deviation (or root mean square) is a constant | centre(g · weight) / deviation |
| product of two variables | uniform: half to each factor | g / 2 |
| factors of a mixture of experts (MAE) | constants | none to the gate |
| weights · V, Q · Kᵀ | a share for each factor | g · share, nothing for a share of 0 |
| softmax | temperature T: the weights S that softmax(x / T) gives | S ∘ (g − Σ g·S) |
| linear map z = Wx + b | epsilon: z stabilised in the denominator | g · z / (z + ε sign z) |

Sources: Bach et al. 2015 (epsilon); Ali et al. 2022, "XAI for Transformers" (weights and deviations as
constants); Achtibat et al. 2024, "AttnLRP" (identity, uniform; the softmax keeps its ordinary gradient, which is
their Deep Taylor rule); Edin et al. 2025, "GIM" (temperature, without the factor 1/T of softmax(x / T)'s own gradient).
Ali et al. have no gated feed-forward layers; every rule set here but `gradient` gives half of a product to each factor.
lxt's CP-LRP gives nothing to the gate there, so its numbers for `cp` differ.

Autograd functions look up the active rules in the backward pass, so one forward graph serves every rule set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """The rules of one set for each kind of operation; the defaults are the ordinary gradient.

    `product` is the share of each factor in a product of two variables (also of a gated activation), `weights`
    and `values` those in weights · V, `scores` that of queries and of keys in Q · Kᵀ. `weights` 0 makes every
    softmax a constant; `temperature` is that of its gradient, 1 the ordinary one. `epsilon` stabilises linear maps,
    relative to the root mean square of z over features.
    """

    activation: Literal["gradient", "identity"] = "gradient"
    norm: Literal["gradient", "constant"] = "gradient"
    product: float = 1.0
    weights: float = 1.0
    values: float = 1.0
    scores: float = 1.0
    temperature: float = 1.0
    epsilon: float | None = None


def epsilon(gradient: Tensor, z: Tensor, size: float) -> Tensor:
    """g · z / (z + ε sign z) with ε = size · root mean square of z over its last axis (Montavon et al. 2019)."""
    margin = size * z.square().mean(dim=-1, keepdim=True).sqrt()
    return gradient * (z / torch.where(z < 0, z - margin, z + margin)).nan_to_num_(nan=0.0)


def tempered_softmax(gradient: Tensor, x: Tensor, *, temperature: float, dim: int) -> Tensor:
    """S ∘ (g − Σ g·S) with S = softmax(x / T) over `dim`: its gradient without the factor 1/T (Edin et al. 2025).

    A sharp softmax has almost no gradient; a higher temperature gives it one.
    """
    weights = torch.softmax(x / temperature, dim=dim, dtype=gradient.dtype)
    return weights * (gradient - (gradient * weights).sum(dim=dim, keepdim=True))


def shared(gradient: Tensor, share: float) -> Tensor | None:
    """g · share; None, which ends the backward pass there, for a share of 0."""
    if share == 0:
        return None
    return gradient if share == 1 else gradient * share


PLAIN = Rules()
"""Ordinary gradients."""


@dataclass
class ActiveRules:
    """The rules of the current backward pass through one recorded graph; by default ordinary gradients.

    The graph's nodes read it, in whatever thread they run.
    """

    rules: Rules = PLAIN


GradientRule = Callable[[Rules, Tensor], Tensor | None]
"""By rules: the gradient at an operation's input for that at its output."""


class _WithGradient(torch.autograd.Function):
    """Returns `output`, an operation's result on x; a rule gives the gradient of x, or None for the ordinary one."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, active: ActiveRules, rule: GradientRule) -> Tensor:
        ctx.active, ctx.rule = active, rule
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        new_gradient = ctx.rule(ctx.active.rules, gradient)
        return (gradient, None, None, None) if new_gradient is None else (None, new_gradient, None, None)


class _Identity(torch.autograd.Function):
    """The identity, with the gradient that a rule gives (None: no gradient)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active: ActiveRules, rule: GradientRule) -> Tensor:
        ctx.active, ctx.rule = active, rule
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.rule(ctx.active.rules, gradient), None, None


class Weighted(torch.autograd.Function):
    """weights [b h t s] · values [b h s k]; the gradient of either is multiplied by its share in the active rules."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, active: ActiveRules) -> Tensor:
        ctx.active = active
        ctx.save_for_backward(weights, values)
        return torch.matmul(weights, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, values = ctx.saved_tensors
        rules = ctx.active.rules
        to_weights = shared(gradient, rules.weights) if ctx.needs_input_grad[0] else None
        same_rule = to_weights is not None and rules.weights == rules.values
        to_values = to_weights if same_rule else shared(gradient, rules.values)
        return (
            None if to_weights is None else torch.matmul(to_weights, values.transpose(-1, -2)),
            None if to_values is None else torch.matmul(weights.transpose(-1, -2), to_values),
            None,
        )


def with_gradient(output: Tensor, x: Tensor, active: ActiveRules, rule: GradientRule) -> Tensor:
    """`output`, which was computed from x, with the gradient of x by `rule`."""
    return _WithGradient.apply(output, x, active, rule)  # type: ignore[no-untyped-call]


def with_share(x: Tensor, active: ActiveRules, share: Callable[[Rules], float]) -> Tensor:
    """x, with its gradient multiplied by a share of the active rules."""
    rule: GradientRule = lambda rules, gradient: shared(gradient, share(rules))  # noqa: E731
    return _Identity.apply(x, active, rule)  # type: ignore[no-untyped-call]


def with_epsilon(z: Tensor, active: ActiveRules) -> Tensor:
    """z, the output of a linear map, with its gradient by the epsilon rule if the active rules have it."""
    constant = z.detach()

    def rule(rules: Rules, gradient: Tensor) -> Tensor:
        return gradient if rules.epsilon is None else epsilon(gradient, constant, rules.epsilon)

    return _Identity.apply(z, active, rule)  # type: ignore[no-untyped-call]
