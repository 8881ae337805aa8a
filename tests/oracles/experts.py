"""Mixtures of attentive experts expert by expert, as the paper writes them, and gates that are not even."""

from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from headscope.model.mixing.experts import Gate


def experts_of(heads: int, size: int) -> list[frozenset[int]]:
    """Every expert as the set of its heads, in the order of what they lack."""
    return [frozenset(range(heads)) - set(missing) for missing in combinations(range(heads), heads - size)]


def mixture(outputs: Tensor, gates: Tensor, size: int) -> Tensor:
    """Σ_i g_i f_i with f_i = (h/k) Σ of the outputs of expert i's heads; outputs [h …], gates [e]."""
    heads = len(outputs)
    output = torch.zeros_like(outputs[0])
    for gate, expert in zip(gates, experts_of(heads, size), strict=True):
        output = output + gate * (heads / size) * sum(outputs[head] for head in expert)
    return output


def perturb_gates(model: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Gate):
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.7)
    return model
