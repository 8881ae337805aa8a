"""What the attention of one forward pass computes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from headscope.heads import Site
from headscope.model.taps import Captured, capture


def capture_once(model: nn.Module, tensors: Iterable[str] = ("weights",), **inputs: Any) -> Captured:
    """`capture` around one forward pass without gradients."""
    with torch.no_grad(), capture(model, tensors) as captured:
        model(**inputs)
    return captured


def weights_of(captured: Captured, site: Site) -> list[Tensor]:
    """Weights [b h t s] of one site, by layer (the last call's)."""
    return [
        captured[place]["weights"] for place in sorted(captured.calls, key=lambda place: place[1]) if place[0] is site
    ]
