"""Find norms and activations that are modules, whose operations together have one rule.

Activations are recognised by class (of torch and of transformers), norms by their function: a module with "norm" in its
class name is run on random numbers and compared with the formulas of LayerNorm and RMSNorm. In other modules each
operation has its own rule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.model.attention import is_half

_TORCH = (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.ELU, nn.LeakyReLU, nn.SELU, nn.CELU, nn.Mish, nn.Hardswish, nn.ReLU6)


def names(text: str) -> frozenset[str]:
    """The words of a text, as names of functions."""
    return frozenset(text.split())


@dataclass(frozen=True)
class NormParameters:
    """(x − mean) / deviation · scale + bias over the last axis; without the mean if not `centred`.

    A `scale` of None is 1, a `bias` of None 0.
    """

    scale: Tensor | None
    bias: Tensor | None
    epsilon: float
    centred: bool = True

    def inverse(self, x: Tensor) -> Tensor:
        """1 / deviation [… 1] of x [… d]."""
        centred_x = x - x.mean(dim=-1, keepdim=True) if self.centred else x
        return torch.rsqrt(centred_x.square().mean(dim=-1, keepdim=True) + self.epsilon)


def norm_of_call(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, NormParameters] | None:
    """The input and the norm of a call of `layer_norm` or `rms_norm`, None if it is over several axes."""
    parameters = ["input", "normalized_shape", "weight", "bias", "eps"]
    if name == "rms_norm":
        parameters.remove("bias")
    call = dict(zip(parameters, args, strict=False)) | dict(kwargs)
    x, epsilon = call["input"], call.get("eps")
    if len(call["normalized_shape"]) != 1:
        return None
    if epsilon is None:
        epsilon = 1e-5 if name == "layer_norm" else torch.finfo(x.dtype).eps
    return x, NormParameters(call.get("weight"), call.get("bias"), float(epsilon), centred=name == "layer_norm")


def activation_classes() -> tuple[type[nn.Module], ...]:
    """The activation classes of torch and of transformers."""
    from transformers.activations import ACT2CLS

    classes: Any = [entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()]
    return (*_TORCH, *classes)


def norms_of(model: nn.Module) -> dict[nn.Module, NormParameters]:
    """The norms of a model by module, without torch's own, which are calls of torch functions."""
    candidates = (module for module in model.modules() if "norm" in type(module).__name__.lower())
    norms = {module: _recognise(module) for module in candidates if not isinstance(module, nn.LayerNorm | nn.RMSNorm)}
    return {module: norm for module, norm in norms.items() if norm is not None}


@torch.no_grad()
def _recognise(module: nn.Module) -> NormParameters | None:
    """The norm that a module computes, with weights that may be offsets from 1 (Gemma); None if it is not a norm."""
    weight: Any = getattr(module, "weight", None)
    bias: Any = getattr(module, "bias", None)
    has_weight = isinstance(weight, Tensor)
    if (has_weight and (weight.ndim != 1 or weight.is_meta)) or any(True for _ in module.children()):
        return None
    values = [getattr(module, name, None) for name in ("variance_epsilon", "eps", "epsilon")]
    epsilon = next((value for value in values if isinstance(value, float)), 0.0)
    like = weight if has_weight else torch.ones(8)
    x = torch.randn(3, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    try:
        y = module(x)
    except Exception:  # its forward needs more than one tensor
        return None
    tolerance = 0.02 if is_half(x.dtype) else 1e-5
    bias = bias.detach() if isinstance(bias, Tensor) else None
    for scale in (weight.detach(), weight.detach() + 1) if has_weight else (None,):
        for subtracts_mean in (False, True):
            norm = NormParameters(scale, bias, epsilon, subtracts_mean)
            centred_x = (x - x.mean(dim=-1, keepdim=True) if subtracts_mean else x).float()
            expected = centred_x * norm.inverse(x.float())
            expected = expected if scale is None else expected * scale.float()
            expected = expected if bias is None else expected + bias.float()
            if isinstance(y, Tensor) and torch.allclose(y.float(), expected, rtol=tolerance, atol=tolerance):
                return norm
    return None
