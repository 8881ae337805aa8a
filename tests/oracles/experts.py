"""Mixtures of attentive experts expert by expert, as the paper writes them, for tests of factors per head."""

from itertools import combinations

import torch
from torch import Tensor


def experts_of(heads: int, size: int) -> list[frozenset[int]]:
    """Every expert as the set of its heads, in the order of what they lack."""
    return [frozenset(range(heads)) - set(missing) for missing in combinations(range(heads), heads - size)]


def mixture(outputs: Tensor, gates: Tensor, size: int) -> Tensor:
    """Σ_i g_i f_i with f_i = (h/k) Σ of the outputs of expert i's heads; outputs [h …], gates [e]."""
    heads = len(outputs)
    found = torch.zeros_like(outputs[0])
    for gate, expert in zip(gates, experts_of(heads, size), strict=True):
        found = found + gate * (heads / size) * sum(outputs[head] for head in expert)
    return found
