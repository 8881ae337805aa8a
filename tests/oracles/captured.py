"""What the attention of one forward pass computes."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from headscope.model.taps import Captured, capture


def capture_once(model: nn.Module, tensors: Iterable[str] = ("weights",), **inputs: Any) -> Captured:
    """`capture` around one forward pass without gradients."""
    with torch.no_grad(), capture(model, tensors) as captured:
        model(**inputs)
    return captured
