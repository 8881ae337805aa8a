"""Mixtures of experts whose gates are not even."""

from typing import Any

import torch

from headscope.model.mixing.experts import Gate


def disturbed(made: Any, seed: int = 3) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in made.modules():
            if isinstance(module, Gate):
                for parameter in module.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype) * 0.7)
    return made
