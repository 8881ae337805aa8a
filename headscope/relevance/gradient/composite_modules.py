"""Modules of several torch operations that have one rule together: norms and activations.

Activations are recognised by class (those of torch and of transformers), norms by what they compute: a module with
"norm" in its class name is run on random numbers and compared with the formulas of LayerNorm and RMSNorm. What fits
neither is left to its operations, which have no rule and are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from headscope.attribution.objectives.predictions import precise
from headscope.relevance.gradient.autograd_functions import ActiveRules, with_gradient
from headscope.relevance.gradient.rules import Rules, constant_deviation, identity_rule

_CLASSES: set[Any] = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
_TORCH = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish, nn.ReLU6)
ACTIVATIONS: tuple[type[nn.Module], ...] = (*_CLASSES, *_TORCH)


@dataclass(frozen=True)
class NormParameters:
    """(x − mean) / deviation · weight + bias, or without mean and bias if not `centred`."""

    weight: Tensor | None
    centred: bool
    epsilon: float

    def inverse(self, x: Tensor) -> Tensor:
        """One over the deviation of x [… d]: [… 1]."""
        centred_x = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        return torch.rsqrt(centred_x.square().mean(dim=-1, keepdim=True) + self.epsilon)


def normalized(output: Tensor, x: Tensor, norm: NormParameters, active: ActiveRules) -> Tensor:
    """The norm's output for x, with the choice between its gradient and a constant deviation."""
    states = precise(x.detach())
    inverse: list[Tensor] = []  # computed at the first backward pass that needs it: plain gradients never do

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        if rules.norm == "gradient":
            return None
        if not inverse:
            inverse.append(norm.inverse(states).to(gradient.dtype))
        weight = None if norm.weight is None else norm.weight.to(gradient.dtype)
        return constant_deviation(gradient, weight, inverse[0], centred=norm.centred)

    return with_gradient(output, x, active, rule)


def activated(output: Tensor, x: Tensor, active: ActiveRules) -> Tensor:
    """An activation's output for x, with the choice between its gradient and the identity rule."""
    before, after = x.detach(), output.detach()

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        return None if rules.activation == "gradient" else identity_rule(gradient, before, after)

    return with_gradient(output, x, active, rule)


ModuleRule = Callable[[Tensor, Tensor, ActiveRules], Tensor]
"""From an operation's output and input: the output with a gradient by the active rules."""


def composite_modules(model: nn.Module) -> dict[nn.Module, ModuleRule]:
    """The rules of a model's norms and activations that are modules of several operations."""
    rules: dict[nn.Module, ModuleRule] = {}
    for module in model.modules():
        if isinstance(module, ACTIVATIONS) and is_zero_at_zero(module):
            rules[module] = activated
        elif "norm" in type(module).__name__.lower() and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            norm = recognise_norm(module)
            if norm is not None:
                rules[module] = _with(norm)
    return rules


def _with(norm: NormParameters) -> ModuleRule:
    return lambda output, x, active: normalized(output, x, norm, active)


@torch.no_grad()
def is_zero_at_zero(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether f(0) = 0, without which the identity rule f(x)/x is not defined."""
    parameter = next(activation.parameters(), None) if isinstance(activation, nn.Module) else None
    zero = torch.zeros(1) if parameter is None else parameter.new_zeros(1)
    return bool((activation(zero) == 0).all())


@torch.no_grad()
def recognise_norm(module: nn.Module) -> NormParameters | None:
    """Which norm a module computes; None where it is neither LayerNorm nor RMSNorm."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 1 or weight.is_meta or any(True for _ in module.children()):
        return None
    names = ("variance_epsilon", "eps", "epsilon")
    size = next((float(getattr(module, name)) for name in names if isinstance(getattr(module, name, None), float)), 0.0)
    x = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        y = module(x)
    except Exception:  # its forward wants more than one tensor
        return None
    bias = getattr(module, "bias", None)
    shift = bias if isinstance(bias, Tensor) else torch.zeros_like(weight)
    for scale in (weight, weight + 1):
        for centred in (False, True):
            norm = NormParameters(scale.detach(), centred, size)
            centred_x = (x - x.mean(dim=-1, keepdim=True) if centred else x).float()
            expected = centred_x * norm.inverse(x.float()) * scale.float() + shift.float()
            if isinstance(y, Tensor) and torch.allclose(y.float(), expected, rtol=_near(x), atol=_near(x)):
                return norm
    return None


def _near(x: Tensor) -> float:
    return 0.02 if x.dtype in (torch.float16, torch.bfloat16) else 1e-5
