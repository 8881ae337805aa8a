"""Autograd functions that look up the active rules in the backward pass: one forward graph serves every rule set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.relevance.gradient.rules import Rules, epsilon, shared

PLAIN = Rules()


@dataclass
class ActiveRules:
    """The rules of the current backward pass through one recorded graph; by default ordinary gradients.

    The graph's nodes read it, in whatever thread they run.
    """

    rules: Rules = PLAIN


GradientRule = Callable[[Rules, Tensor], Tensor | None]
"""By rules: the gradient at an operation's input for that at its output."""


class _WithGradient(torch.autograd.Function):
    """Returns `output`, an operation's result; a rule sends the gradient to `x` directly, or None through `output`."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor, active: ActiveRules, rule: GradientRule) -> Tensor:
        ctx.active, ctx.rule = active, rule
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        changed = ctx.rule(ctx.active.rules, gradient)
        return (gradient, None, None, None) if changed is None else (None, changed, None, None)


class _Identity(torch.autograd.Function):
    """The identity, whose gradient a rule changes; None for no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, active: ActiveRules, rule: GradientRule) -> Tensor:
        ctx.active, ctx.rule = active, rule
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.rule(ctx.active.rules, gradient), None, None


class _Weighted(torch.autograd.Function):
    """weights [b h t s] · values [b h s k], with a share of the gradient for either."""

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
    """`output`, computed from x, with the gradient that `rule` chooses."""
    result: Tensor = _WithGradient.apply(output, x, active, rule)  # type: ignore[no-untyped-call]
    return result


def with_share(x: Tensor, active: ActiveRules, share: Callable[[Rules], float]) -> Tensor:
    """x, whose gradient is multiplied by a share of the active rules."""
    rule: GradientRule = lambda rules, gradient: shared(gradient, share(rules))  # noqa: E731
    result: Tensor = _Identity.apply(x, active, rule)  # type: ignore[no-untyped-call]
    return result


def with_epsilon(z: Tensor, active: ActiveRules) -> Tensor:
    """z of a linear map, with the epsilon rule where the active rules have one."""
    constant = z.detach()

    def rule(rules: Rules, gradient: Tensor) -> Tensor:
        return gradient if rules.epsilon is None else epsilon(gradient, constant, rules.epsilon)

    result: Tensor = _Identity.apply(z, active, rule)  # type: ignore[no-untyped-call]
    return result


def weighted_values(weights: Tensor, values: Tensor, active: ActiveRules) -> Tensor:
    """weights [b h t s] · values [b h s k] by the active rules."""
    context: Tensor = _Weighted.apply(weights, values, active)  # type: ignore[no-untyped-call]
    return context
