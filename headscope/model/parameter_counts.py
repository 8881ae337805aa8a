"""How many parameters the parts of a model have."""

from __future__ import annotations

from collections import Counter

from torch import nn


def parameters_by_part(model: nn.Module) -> dict[str, int]:
    """Parameters by kind of part: embeddings, attention, normalisation, feed-forward and other; then all."""
    parts: Counter[str] = Counter()
    attention = {
        id(module)
        for module in model.modules()
        if "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()
    }
    counted: set[int] = set()
    inside: set[str] = set()
    for name, module in model.named_modules():
        if id(module) in attention:
            inside.add(name)
        inside_attention = any(name == outer or name.startswith(f"{outer}.") for outer in inside)
        for parameter in module.parameters(recurse=False):
            if id(parameter) not in counted:
                counted.add(id(parameter))
                parts[_part(module, inside_attention)] += parameter.numel()
    return {**dict(sorted(parts.items())), "total": sum(parts.values())}


def _part(module: nn.Module, inside_attention: bool) -> str:
    if isinstance(module, nn.Embedding) or "embedding" in type(module).__name__.lower():
        return "embeddings"
    if "norm" in type(module).__name__.lower():
        return "normalisation"
    return "attention" if inside_attention else "feed-forward and other"
