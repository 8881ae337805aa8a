"""Which outputs of a linear layer belong to which head, where its weight is no leaf of a graph that could be followed.

Of offloaded and quantised layers the output is marked: it becomes the start of a graph whose first node names the
module. So no weight is kept by a graph, and whatever computes the product may be of any kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from headscope.model.storage.stored_weights import is_plain, readable


class Marked(torch.autograd.Function):
    """The identity, whose node in the graph has the `module` that made the values."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, module: nn.Module) -> Tensor:
        """Values as they are."""
        ctx.module = module
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Gradients as they are."""
        return gradients[0], None


@contextmanager
def marked_products(model: nn.Module) -> Iterator[None]:
    """Within the block outputs of linear layers that are offloaded or quantised begin a graph of their own."""

    def mark(module: nn.Module, _: Any, output: Tensor) -> Tensor:
        marked: Tensor = Marked.apply(output.detach().requires_grad_(), module)  # type: ignore[no-untyped-call]
        return marked

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Linear | Conv1D) and readable(module) and not is_plain(module):
                stack.callback(module.register_forward_hook(mark).remove)
        yield


def marked_module(node: Any) -> nn.Module | None:
    """The module that a node of the graph was marked with."""
    module: nn.Module | None = getattr(node, "module", None) if type(node).__name__ == "MarkedBackward" else None
    return module
