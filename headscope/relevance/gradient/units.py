"""Modules whose own code is several operations that have one rule together: norms and activations.

Activations are known by class (those of torch and of transformers), norms by what they compute: a module whose
class says that it normalises is tried on random numbers and compared with the two formulas there are. What
fits neither is left to the operations it is made of, which have no rule and are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.activations import ACT2CLS

from headscope.relevance.gradient.functions import Switch, detour
from headscope.relevance.gradient.rules import Rules, constant_deviation, identity_rule

_CLASSES = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
_TORCH = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish, nn.ReLU6)
ACTIVATIONS: tuple[type[nn.Module], ...] = (*_CLASSES, *_TORCH)
_ABSENT = object()


@dataclass(frozen=True)
class NormUnit:
    """(x − mean) / deviation · weight + bias, or without mean and bias if not `centred`."""

    weight: Tensor | None
    centred: bool
    epsilon: float

    def inverse(self, x: Tensor) -> Tensor:
        """One over the deviation of x [… d]: [… 1]."""
        kept = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        return torch.rsqrt(kept.square().mean(dim=-1, keepdim=True) + self.epsilon)


def normalized(plain: Tensor, x: Tensor, norm: NormUnit, switch: Switch) -> Tensor:
    """The norm's result `plain` for x, with the choice between its gradient and a constant deviation."""
    precise = x.detach().float() if x.dtype in (torch.float16, torch.bfloat16) else x.detach()
    kept: list[Tensor] = []  # made at the first backward pass that asks: plain gradients never do

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        if rules.norm == "gradient":
            return None
        if not kept:
            kept.append(norm.inverse(precise).to(gradient.dtype))
        weight = None if norm.weight is None else norm.weight.to(gradient.dtype)
        return constant_deviation(gradient, weight, kept[0], centred=norm.centred)

    return detour(plain, x, switch, rule)


def activated(plain: Tensor, x: Tensor, switch: Switch) -> Tensor:
    """An activation's result `plain` for x, with the choice between its gradient and the identity rule."""
    before, after = x.detach(), plain.detach()

    def rule(rules: Rules, gradient: Tensor) -> Tensor | None:
        return None if rules.activation == "gradient" else identity_rule(gradient, before, after)

    return detour(plain, x, switch, rule)


Unit = Callable[[Tensor, Tensor, Switch], Tensor]
"""Makes of an operation's result and its input the result with a choice of gradients."""


def units_of(model: nn.Module) -> dict[nn.Module, Unit]:
    """The norms and activations of a model that are modules of several operations."""
    found: dict[nn.Module, Unit] = {}
    for module in model.modules():
        if isinstance(module, ACTIVATIONS) and vanishes_at_zero(module):
            found[module] = activated
        elif "norm" in type(module).__name__.lower() and not isinstance(module, nn.LayerNorm | nn.RMSNorm):
            norm = recognised(module)
            if norm is not None:
                found[module] = _with(norm)
    return found


def _with(norm: NormUnit) -> Unit:
    return lambda plain, x, switch: normalized(plain, x, norm, switch)


@torch.no_grad()
def vanishes_at_zero(activation: Callable[[Tensor], Tensor]) -> bool:
    """Whether f(0) = 0, without which f(x)/x says nothing."""
    parameter = next(activation.parameters(), None) if isinstance(activation, nn.Module) else None
    zero = torch.zeros(1) if parameter is None else parameter.new_zeros(1)
    return bool((activation(zero) == 0).all())


@torch.no_grad()
def recognised(module: nn.Module) -> NormUnit | None:
    """Which norm a module computes; None where it is neither of the two."""
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
            norm = NormUnit(scale.detach(), centred, size)
            kept = (x - x.mean(dim=-1, keepdim=True) if centred else x).float()
            expected = kept * norm.inverse(x.float()) * scale.float() + shift.float()
            if isinstance(y, Tensor) and torch.allclose(y.float(), expected, rtol=_near(x), atol=_near(x)):
                return norm
    return None


def _near(x: Tensor) -> float:
    return 0.02 if x.dtype in (torch.float16, torch.bfloat16) else 1e-5


@contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Tensor]]) -> Iterator[None]:
    """Within the block these modules compute with the given functions; their own are back after it."""
    with ExitStack() as stack:
        for module, forward in forwards.items():
            stack.callback(_put_back, module, module.__dict__.get("forward", _ABSENT))
            module.__dict__["forward"] = forward
        yield


def _put_back(module: nn.Module, before: object) -> None:
    if before is _ABSENT:
        del module.__dict__["forward"]
    else:
        module.__dict__["forward"] = before
