"""Nodes of the graph that ask, on the way back, which rules hold: one forward graph serves every rule set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headscope.relevance.gradient.rules import Rules, epsilon, shared

PLAIN = Rules()


@dataclass
class Switch:
    """The rules of the backward pass that is under way; without any, gradients are the ordinary ones.

    It belongs to one recorded graph and is read by its nodes, in whatever thread they run.
    """

    rules: Rules = PLAIN


Detoured = Callable[[Rules, Tensor], Tensor | None]
"""The gradient at the input of an operation for that at its output; None where the ordinary one holds."""


class _Detour(torch.autograd.Function):
    """Hands on `plain`, an operation's result; on the way back gradients go through it, or straight to `direct`."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, direct: Tensor, switch: Switch, rule: Detoured) -> Tensor:
        ctx.switch, ctx.rule = switch, rule
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        found = ctx.rule(ctx.switch.rules, gradient)
        return (gradient, None, None, None) if found is None else (None, found, None, None)


class _Shared(torch.autograd.Function):
    """Hands on a tensor; gradients are multiplied by a share on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: Switch, share: Callable[[Rules], float]) -> Tensor:
        ctx.switch, ctx.share = switch, share
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        return shared(gradient, ctx.share(ctx.switch.rules)), None, None


class _Stabilized(torch.autograd.Function):
    """Hands on the result z of a linear map; the epsilon rule on the way back."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, switch: Switch) -> Tensor:
        ctx.switch, ctx.z = switch, z.detach()
        return z.view_as(z)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        size = ctx.switch.rules.epsilon
        return (gradient if size is None else epsilon(gradient, ctx.z, size)), None


class _Weighted(torch.autograd.Function):
    """weights [b h t s] · values [b h s k], with a share of the gradient for each."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, values: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        ctx.save_for_backward(weights, values)
        return torch.matmul(weights, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        weights, values = ctx.saved_tensors
        rules = ctx.switch.rules
        to_weights = shared(gradient, rules.weights) if ctx.needs_input_grad[0] else None
        same = to_weights is not None and rules.weights == rules.values
        to_values = to_weights if same else shared(gradient, rules.values)
        return (
            None if to_weights is None else torch.matmul(to_weights, values.transpose(-1, -2)),
            None if to_values is None else torch.matmul(weights.transpose(-1, -2), to_values),
            None,
        )


def detour(plain: Tensor, direct: Tensor, switch: Switch, rule: Detoured) -> Tensor:
    """`plain`, computed from `direct`, with the choice of gradient that `rule` makes."""
    found: Tensor = _Detour.apply(plain, direct, switch, rule)  # type: ignore[no-untyped-call]
    return found


def with_share(x: Tensor, switch: Switch, share: Callable[[Rules], float]) -> Tensor:
    """x, whose gradient is multiplied by the share that the rules of the moment say."""
    found: Tensor = _Shared.apply(x, switch, share)  # type: ignore[no-untyped-call]
    return found


def with_epsilon(z: Tensor, switch: Switch) -> Tensor:
    """z of a linear map, with the epsilon rule where the rules of the moment have one."""
    found: Tensor = _Stabilized.apply(z, switch)  # type: ignore[no-untyped-call]
    return found


def weighted(weights: Tensor, values: Tensor, switch: Switch) -> Tensor:
    """weights [b h t s] · values [b h s k] by the rules of the moment."""
    found: Tensor = _Weighted.apply(weights, values, switch)  # type: ignore[no-untyped-call]
    return found
