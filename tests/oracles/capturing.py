"""Tensors of the attention of one forward pass."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headscope.heads import Site
from headscope.model.taps import Captured, capture


def capture_once(model: nn.Module, tensors: Iterable[str] = ("weights",), **inputs: Any) -> Captured:
    """`capture` around one forward pass without gradients."""
    with torch.no_grad(), capture(model, tensors) as record:
        model(**inputs)
    return record


def weights_of(record: Captured, site: Site) -> list[Tensor]:
    """Weights [b h t s] of one site, by layer (the last call's)."""
    layers = sorted(layer for call_site, layer in record.calls if call_site is site)
    return [record[site, layer]["weights"] for layer in layers]
